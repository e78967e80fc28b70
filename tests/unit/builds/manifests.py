"""Reads builds/deploy/kubernetes like kustomize, and the published schemas of its resources.

Supports only the features that those files use: resources, components, images, JSON patches, one
generator. Anything else in a kustomization is an error, so that nothing is ignored.
"""

from __future__ import annotations

import copy
import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT

KUBERNETES = ROOT / "builds" / "deploy" / "kubernetes"
PUBLISHED = ROOT / "tests" / "data" / "kubernetes"
CRDS = ("inferencepools.yaml", "httproutes.yaml", "scaledobjects.yaml", "podmonitors.yaml")
READ = {"apiVersion", "kind", "resources", "components", "images", "patches", "configMapGenerator"}

Resource = dict[str, Any]


def render(folder: Path) -> list[Resource]:
    """Return what `kubectl apply --kustomize FOLDER` would send, except for the generator's hash in
    names."""
    return _build(folder, [])


def _build(folder: Path, found: list[Resource]) -> list[Resource]:
    """Return `found` and the folder's resources, with the folder's changes applied to all."""
    stated = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unread := stated.keys() - READ:
        raise ValueError(f"{folder}: {sorted(unread)} is not read here")
    for name in stated.get("resources", ()):
        path = folder / name
        if path.is_dir():
            found += render(path)
        else:
            found += yaml.safe_load_all(path.read_text())
    for generator in stated.get("configMapGenerator", ()):
        data = {name: (folder / name).read_text() for name in generator["files"]}
        metadata = {"name": generator["name"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for name in stated.get("components", ()):
        _build(folder / name, found)
    for change in stated.get("patches", ()):
        target = change["target"]
        (resource,) = [
            each
            for each in found
            if (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])
        ]
        for operation in yaml.safe_load(change["patch"]):
            _patch(resource, operation)
    for image in stated.get("images", ()):
        _rename(found, image)
    return found


def _patch(resource: Resource, operation: dict[str, Any]) -> None:
    """Apply one operation of a JSON patch (RFC 6902): add, replace or remove."""
    *parents, last = operation["path"].strip("/").split("/")
    place: Any = resource
    for step in parents:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if isinstance(place, list):
        if (operation["op"], last) != ("add", "-"):
            raise ValueError(f"{operation} is not read here")
        place.append(operation["value"])
    elif operation["op"] == "add":
        place[last] = operation["value"]
    elif operation["op"] in ("replace", "remove"):
        del place[last]  # a missing key is an error, as in kustomize
        if operation["op"] == "replace":
            place[last] = operation["value"]
    else:
        raise ValueError(f"{operation} is not read here")


def _rename(resources: list[Resource], image: dict[str, str]) -> None:
    used = False
    for resource in resources:
        for container in containers(resource):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
                used = True
    if not used:
        raise ValueError(f"no container has the image {image['name']}")


def containers(resource: Resource) -> list[dict[str, Any]]:
    """Return the containers of a Deployment; none for other kinds."""
    if resource["kind"] != "Deployment":
        return []
    found: list[dict[str, Any]] = resource["spec"]["template"]["spec"]["containers"]
    return found


def published(name: str) -> bytes:
    """Return the file as its project published it."""
    return gzip.decompress((PUBLISHED / f"{name}.gz").read_bytes())


@cache
def schemas() -> dict[tuple[str, str], dict[str, Any]]:
    """`apiVersion` and kind of each vendored CRD → its JSON schema, closed to unknown fields."""
    found = {}
    for name in CRDS:
        crd = yaml.load(published(name), Loader=yaml.CSafeLoader)["spec"]
        for version in crd["versions"]:
            key = (f"{crd['group']}/{version['name']}", crd["names"]["kind"])
            schema = _closed(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            found[key] = schema
    return found


def _closed(schema: Any) -> Any:
    """Convert a structural schema to JSON Schema, with errors for fields that the API server would
    drop."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if isinstance(closed.get("type"), str) and isinstance(closed.get("properties"), dict):
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed.setdefault("additionalProperties", False)
    if schema.get("nullable") and "type" in closed:
        closed["type"] = [closed["type"], "null"]
    return closed


@cache
def scaler_fields(kind: str) -> dict[str, dict[str, Any]]:
    """Return the `metadata` that KEDA's scaler of this type reads: name → definition."""
    scalers = json.loads(published("scalers-schema.json"))["scalers"]
    (scaler,) = [each for each in scalers if each["type"] == kind]
    return {each["name"]: each for each in scaler["parameters"]}


def changed(resource: Resource, path: str, value: Any) -> Resource:
    """Return a copy with `value` at `path` (`spec/triggers/0/type`)."""
    copied = copy.deepcopy(resource)
    *parents, last = path.split("/")
    place: Any = copied
    for step in parents:
        place = place[int(step)] if isinstance(place, list) else place.setdefault(step, {})
    place[last] = value
    return copied
