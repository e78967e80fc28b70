"""Prometheus scrapes three workers, KEDA's query counts their requests, kubectl renders the
same."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.ports import free_port
from tests.support.worker import WorkerProcess, until
from tests.unit.builds.manifests import KUBERNETES, render

pytestmark = pytest.mark.long


@contextmanager
def prometheus(workers: list[WorkerProcess], folder: Path) -> Iterator[httpx.Client]:
    """Debian's Prometheus with the job that the PodMonitor generates."""
    program = shutil.which("prometheus")
    assert program, "Prometheus is not installed: apt-get install prometheus"
    targets = [f"127.0.0.1:{worker.port}" for worker in workers]
    job = {
        "job_name": "llorch-worker",
        "scrape_interval": "1s",
        "static_configs": [{"targets": targets}],
    }
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump({"scrape_configs": [job]}))
    port = free_port()
    line = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    line += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


def value(client: httpx.Client, query: str) -> float | None:
    """Return the query's single value; `None` if there is no series or no Prometheus yet."""
    try:
        answer = client.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return None
    if answer.status_code == 503:
        return None  # still replaying its log
    assert answer.status_code == 200, answer.text
    result = answer.json()["data"]["result"]
    return float(result[0]["value"][1]) if result else None


def trigger() -> dict[str, Any]:
    (scaled,) = [each for each in render(KUBERNETES / "cpu") if each["kind"] == "ScaledObject"]
    found: dict[str, Any] = scaled["spec"]["triggers"][0]["metadata"]
    return found


def test_kedas_query_counts_the_work(
    workers: list[WorkerProcess], tmp_path: Path, counts: list[str]
) -> None:
    query, threshold = trigger()["query"], float(trigger()["threshold"])
    n_streams = 18  # four slots each: twelve run, six wait
    with prometheus(workers, tmp_path) as client, ExitStack() as streams:
        until(lambda: value(client, "sum(up)") == 3, lambda: "not three scraped targets")
        until(lambda: value(client, query) == 0, lambda: str(value(client, query)))
        for worker in workers:
            for _ in range(n_streams // len(workers)):
                streaming = worker.streaming("Once", max_tokens=1000, ignore_eos=True)
                assert streams.enter_context(streaming).status_code == 200
            # A stream has its head before its slot.
            worker.wait_metric("vllm:num_requests_running", 4)
            # Frozen, so that the figures stand still until they are scraped.
            worker.freeze_engine()
            streams.callback(worker.thaw_engine)
        until(lambda: value(client, query) == n_streams, lambda: str(value(client, query)))
        waiting = value(client, "sum(vllm:num_requests_waiting)")
        wanted = math.ceil(n_streams / threshold)
        counts.append(
            f"prometheus     KEDA's query counts {n_streams} of {n_streams} streams, "
            f"{waiting:.0f} of them waiting: {wanted} workers wanted"
        )
        assert waiting == 6 and wanted == 3
        streams.close()
        until(lambda: value(client, query) == 0, lambda: str(value(client, query)))
        assert value(client, "sum(up)") == 3


def test_promtool_finds_nothing_wrong_with_the_metrics(workers: list[WorkerProcess]) -> None:
    program = shutil.which("promtool")
    assert program, "promtool is not installed: apt-get install prometheus"
    text = workers[0].get("/metrics").content
    done = subprocess.run([program, "check", "metrics"], input=text, capture_output=True)
    # Its style guide prefers other names than the frozen ones; only parse errors count.
    assert b"error while linting" not in done.stderr, done.stderr.decode()
    assert done.returncode in (0, 3), done.stderr.decode()


def test_grafanas_dashboard_asks_nothing_that_prometheus_refuses(
    workers: list[WorkerProcess], tmp_path: Path
) -> None:
    dashboard = json.loads((KUBERNETES.parent / "grafana.json").read_text("utf-8"))
    queries = [each["expr"] for panel in dashboard["panels"] for each in panel["targets"]]
    with prometheus(workers, tmp_path) as client:
        until(lambda: value(client, "sum(up)") == 3, lambda: "not three scraped targets")
        for query in queries:
            plain = query.replace("$instance", ".*").replace("$__rate_interval", "1m")
            value(client, plain)


@pytest.mark.parametrize("overlay", ["cpu", "cuda"])
def test_kubectl_renders_what_the_tests_check(routers_bin: Path, overlay: str) -> None:
    line = [str(routers_bin / "kubectl"), "kustomize", str(KUBERNETES / overlay)]
    shown = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    # The generator appends the same hash everywhere.
    rendered = list(
        yaml.safe_load_all(re.sub(r"llorch-picker-[a-z0-9]{10}\b", "llorch-picker", shown))
    )

    def name(resource: dict[str, Any]) -> tuple[str, str]:
        return resource["kind"], resource["metadata"]["name"]

    assert sorted(rendered, key=name) == sorted(render(KUBERNETES / overlay), key=name)
