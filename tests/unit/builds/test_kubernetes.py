"""builds/deploy/kubernetes: valid by the published schemas, and true to what the worker does."""

from __future__ import annotations

import hashlib
import importlib
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from tests.support.status import ready_status
from tests.unit.builds.manifests import (
    CRDS,
    KUBERNETES,
    PUBLISHED,
    Resource,
    changed,
    containers,
    published,
    render,
    scaler_fields,
    schemas,
)
from worker.flags import parse_flags
from worker.observability.metrics import Metrics
from worker.setting_faults import ENV_PREFIX
from worker.settings import FIELDS, Settings

OVERLAYS = ["cpu", "cuda"]
KUBERNETES_VERSION = "1.37"
validator: Any = importlib.import_module("kubernetes_validate")


def one(resources: list[Resource], kind: str, name: str = "llorch-worker") -> Resource:
    (found,) = [
        each for each in resources if each["kind"] == kind and each["metadata"]["name"] == name
    ]
    return found


def check(resource: Resource) -> None:
    """Raise unless all fields of the resource are known and have the right types."""
    schema = schemas().get((resource["apiVersion"], resource["kind"]))
    if schema is None:
        assert validator.validate(resource, KUBERNETES_VERSION, strict=True) is not None
    else:
        jsonschema.Draft202012Validator(schema).validate(resource)


def test_the_schemas_are_the_published_ones() -> None:
    table = (PUBLISHED / "README.md").read_text()
    for name in (*CRDS, "scalers-schema.json"):
        assert hashlib.sha256(published(name)).hexdigest() in table


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_resource_fits_its_schema(overlay: str) -> None:
    resources = render(KUBERNETES / overlay)
    for resource in resources:
        check(resource)
    kinds = {each["kind"] for each in resources}
    assert kinds >= {"Deployment", "Service", "PodDisruptionBudget", "Role", "ConfigMap"}
    assert kinds >= {kind for _, kind in schemas()}


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", "spec/template/spec/containers/0/livenessprobe", {}),
        ("Deployment", "spec/template/spec/terminationGracePeriodSeconds", "620"),
        ("Service", "spec/ports/0/port", "http"),
        ("InferencePool", "spec/targetPort", 8080),
        ("InferencePool", "spec/targetPorts/0/number", 80800),
        ("InferencePool", "spec/endpointPickerRef/failureMode", "Open"),
        ("HTTPRoute", "spec/rules/0/backendRefs/0/port", "8080"),
        ("HTTPRoute", "spec/rules/0/timeouts/request", "10 minutes"),
        ("ScaledObject", "spec/minReplicas", 1),
        ("ScaledObject", "spec/fallback/replicas", "2"),
        ("PodMonitor", "spec/podMetricsEndpoints/0/interval", "5 s"),
        ("PodMonitor", "spec/podMetricsEndpoint", []),
    ],
)
def test_a_wrong_field_is_found(kind: str, path: str, value: Any) -> None:
    resource = changed(one(render(KUBERNETES / "cpu"), kind), path, value)
    with pytest.raises((validator.ValidationError, jsonschema.ValidationError)):
        check(resource)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_and_grace_are_the_workers(overlay: str) -> None:
    pod = one(render(KUBERNETES / overlay), "Deployment")["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    paths = {kind: worker[kind]["httpGet"]["path"] for kind in worker if kind.endswith("Probe")}
    assert paths == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    assert pod["enableServiceLinks"] is False
    drain = next(e["value"] for e in worker["env"] if e["name"] == "LLORCH_DRAIN_TIMEOUT")
    pre_stop = worker["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= float(drain) + pre_stop + 5
    assert ("nvidia.com/gpu" in worker["resources"]["limits"]) == (overlay == "cuda")
    assert worker["image"].startswith(f"llorch-{overlay}:")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_variable_and_flag_is_a_setting(
    overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = one(render(KUBERNETES / overlay), "Deployment")
    (worker,) = containers(deployment)
    backend: Any = overlay
    for variable in worker["env"]:
        assert variable["name"].removeprefix(ENV_PREFIX).lower() in FIELDS
        if "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    settings = Settings.load(backend, parse_flags(backend, worker["args"]))
    assert settings.drain_timeout == 600


def test_with_a_pool_manager_the_variables_are_settings_too(tmp_path: Path) -> None:
    component = KUBERNETES / "pool-manager"
    resources = render(KUBERNETES / "base")
    before = len(containers(one(resources, "Deployment"))[0]["env"])
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": [str(KUBERNETES / "base")], "components": [str(component)]})
    )
    deployment = one(render(tmp_path), "Deployment")
    check(deployment)
    added = [each["name"] for each in containers(deployment)[0]["env"][before:]]
    assert len(added) == 4
    assert all(name.removeprefix(ENV_PREFIX).lower() in FIELDS for name in added)


def test_everything_chooses_the_same_pods() -> None:
    resources = render(KUBERNETES / "cpu")
    labels = one(resources, "Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        one(resources, "Deployment")["spec"]["selector"]["matchLabels"],
        one(resources, "Service")["spec"]["selector"],
        one(resources, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one(resources, "InferencePool")["spec"]["selector"]["matchLabels"],
        one(resources, "PodMonitor")["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
    route, pool = one(resources, "HTTPRoute"), one(resources, "InferencePool")
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert backend["name"] == pool["metadata"]["name"]
    picker = one(resources, "Service", pool["spec"]["endpointPickerRef"]["name"])
    assert pool["spec"]["endpointPickerRef"]["port"]["number"] in [
        each["port"] for each in picker["spec"]["ports"]
    ]
    assert one(resources, "ScaledObject")["spec"]["scaleTargetRef"]["name"] == "llorch-worker"
    assert "replicas" not in one(resources, "Deployment")["spec"]


def test_the_picker_reads_what_the_worker_writes() -> None:
    """The configuration's fields are those of llm-d-router v0.10.0, apix/config/v1alpha1."""
    resources = render(KUBERNETES / "cpu")
    config = yaml.safe_load(
        one(resources, "ConfigMap", "llorch-picker")["data"]["picker-config.yaml"]
    )
    assert (config["apiVersion"], config["kind"]) == ("llm-d.ai/v1alpha1", "EndpointPickerConfig")
    assert config.keys() <= {
        *("apiVersion", "kind", "featureGates", "plugins", "schedulingProfiles"),
        *("dataLayer", "flowControl", "requestHandler"),
    }
    plugins = {each.get("name", each["type"]): each for each in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    (source,) = config["dataLayer"]["sources"]
    references = [source, *source["extractors"], *profile["plugins"]]
    references.append(config["flowControl"]["saturationDetector"])
    assert {each["pluginRef"] for each in references} <= plugins.keys()

    extractor = plugins["core-metrics-extractor"]["parameters"]
    labels = one(resources, "Deployment")["spec"]["template"]["metadata"]["labels"]
    (engine,) = extractor["engineConfigs"]
    assert labels[extractor["engineLabelKey"]] == engine["name"]
    metrics = _series()
    for name, spec in engine.items():
        assert name == "name" or spec in metrics, f"{name}: the worker has no {spec}"


def test_keda_counts_what_the_worker_writes() -> None:
    resources = render(KUBERNETES / "cpu")
    scaled = one(resources, "ScaledObject")["spec"]
    (trigger,) = scaled["triggers"]
    fields = scaler_fields(trigger["type"])
    assert trigger["metadata"].keys() <= fields.keys()
    required = {
        name for name, field in fields.items() if not {"optional", "default"} & field.keys()
    }
    assert required <= trigger["metadata"].keys()

    query = trigger["metadata"]["query"]
    metrics = _series()
    names = re.findall(r"vllm:\w+", query)
    assert set(names) == {"vllm:num_requests_waiting", "vllm:num_requests_running"}
    assert set(names) <= metrics.keys()
    monitor = one(resources, "PodMonitor")
    job = one(resources, "Deployment")["spec"]["template"]["metadata"]["labels"][
        monitor["spec"]["jobLabel"]
    ]
    assert re.findall(r'job="([^"]*)"', query) == [job, job]

    (worker,) = containers(one(resources, "Deployment"))
    slots = next(e["value"] for e in worker["env"] if e["name"] == "LLORCH_SLOTS")
    assert float(trigger["metadata"]["threshold"]) == pytest.approx(0.8 * int(slots))
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 300


def _series() -> dict[str, str]:
    """Return the series of `/metrics`: name → kind."""
    text = Metrics("worker").exposition(ready_status())
    typed = [line for line in text.decode().splitlines() if line.startswith("# TYPE ")]
    return {name: kind for _, _, name, kind in (line.split(" ") for line in typed)}
