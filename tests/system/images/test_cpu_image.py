"""The CPU image as a user runs it: from one `run` line to a streamed story and the stop."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.support import sse
from tests.support.pool_manager import PoolManager
from tests.support.worker import until
from tests.system.images.conftest import image_size_bytes
from tests.system.images.container import Container, environment, podman, running

pytestmark = pytest.mark.long

SIZE_LIMIT_BYTES = 400_000_000
# podman gives even a read-only container a /tmp, which others do not.
CACHE = ("--read-only-tmpfs=false", "--tmpfs=/cache:mode=1777")
CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 32,
}


@pytest.fixture(scope="module")
def worker(image: str, figures: dict[str, float]) -> Iterator[Container]:
    """Started without flags on a read-only root, as README shows."""
    with running(image, options=("--read-only", *CACHE)) as container:
        figures["cpu_port_answers_ms"] = container.wait_for("/health")
        figures["cpu_cold_start_to_ready_ms"] = container.wait_for("/ready")
        yield container


def test_the_image_is_small(image: str, figures: dict[str, float]) -> None:
    size = image_size_bytes(image)
    figures["cpu_image_mb"] = size / 1e6
    assert size <= SIZE_LIMIT_BYTES


def test_it_streams_a_story(worker: Container, figures: dict[str, float]) -> None:
    stream, figures["cpu_first_token_ms"] = worker.timed_story()
    assert stream.end["tokens_out"] > 10
    assert " " in stream.text


def test_it_answers_a_chat(worker: Container) -> None:
    answer = worker.post("/v1/chat/completions", CHAT).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_a_cancel_ends_the_stream(worker: Container) -> None:
    fields = {"max_tokens": 1000, "ignore_eos": True}
    with worker.streaming("cancelled", "Once upon a time", **fields) as response:
        chunks = response.iter_raw()
        got = [next(chunks)]
        started = time.monotonic()
        assert worker.post("/cancel", {"job_id": "cancelled"}).status_code == 202
        got += list(chunks)
    assert time.monotonic() - started < 1
    assert sse.collect(got).error["code"] == "CANCELLED"


def test_it_is_nobody_and_the_root_cannot_be_written(worker: Container) -> None:
    assert worker.run("python", "-c", "import os; print(os.getuid(), os.getgid())") == "10001 10001"
    for folder in ("/", "/opt/llorch", "/etc"):
        code = f"import os; print(os.access({folder!r}, os.W_OK))"
        assert worker.run("python", "-c", code) == "False"


def test_the_variant_and_the_build_are_told(worker: Container) -> None:
    engine = worker.get("/info").json()["engine"]
    assert engine["build"]["backend"] == "cpu"
    assert engine["cpu_variant"] == worker.get("/health").json()["cpu_variant"]


def test_podman_sees_it_healthy(worker: Container) -> None:
    podman("healthcheck", "run", worker.name)
    assert worker.inspect()["Config"]["StopSignal"] in ("SIGTERM", 15)


def test_no_compiler_no_pip_no_cache(image: str) -> None:
    code = (
        "import importlib.util as u, pathlib as p, shutil as s;"
        "print([t for t in ('g++', 'gcc', 'cc', 'cmake', 'pip') if s.which(t)],"
        " u.find_spec('pip') is not None and '/opt/llorch' in u.find_spec('pip').origin,"
        " [str(f) for f in p.Path('/opt/llorch').rglob('*rpc*.so')],"
        " p.Path('/root/.cache').exists(), list(p.Path('/var/lib/apt/lists').iterdir()))"
    )
    shown = podman("run", "--rm", "--user=0", "--entrypoint=python", image, "-c", code)
    assert shown == "[] False [] False []"


def test_the_labels_say_what_it_is(image: str) -> None:
    labels = json.loads(podman("image", "inspect", "--format", "{{json .Labels}}", image))
    assert labels["org.opencontainers.image.title"] == "llorch-cpu"
    assert labels["org.opencontainers.image.licenses"] == "GPL-3.0-or-later"
    found = [labels[f"org.opencontainers.image.{name}"] for name in ("revision", "created")]
    shown = ["git", "log", "-1", "--format=%H %cI", found[0]]
    commit = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert found == (commit or ["unknown", "unknown"])
    assert labels["org.opencontainers.image.source"]


def test_the_sbom_lists_what_is_in_it(image: str) -> None:
    shown = podman("run", "--rm", "--entrypoint=cat", image, "/opt/llorch/sbom.cdx.json")
    purls = {each["purl"] for each in json.loads(shown)["components"]}
    versions = podman("run", "--rm", "--entrypoint=dpkg-query", image, "--show", "libstdc++6")
    name, version = versions.replace(":", " ", 1).split()[0], versions.split()[-1]
    assert any(purl.startswith(f"pkg:deb/{name}@{version}") for purl in purls)
    code = "import importlib.metadata as m;"
    code += "print(*(f'{each.name}@{each.version}' for each in m.distributions()))"
    installed = podman("run", "--rm", "--entrypoint=python", image, "-c", code).split()
    python = {purl.removeprefix("pkg:pypi/") for purl in purls if purl.startswith("pkg:pypi/")}
    assert {name.lower().replace("_", "-") for name in installed} <= python


def test_it_leaves_no_volume_behind(image: str) -> None:
    shown = podman("image", "inspect", "--format", "{{json .Config.Volumes}}", image)
    assert shown in ("null", "{}")


def test_a_quota_is_seen(image: str) -> None:
    with running(image, options=("--cpus=1",)) as container:
        container.wait_for("/ready")
        engine = container.get("/info").json()["engine"]
        assert engine["threads"] == 1, engine["threads_derivation"]


def test_ones_own_model_is_served_from_the_volume(image: str, tmp_path: Path) -> None:
    with running(image, options=("--cpus=2",)) as first:
        first.wait_for("/ready")
        (converted,) = first.run(
            "python", "-c", "import pathlib as p; print(*p.Path('/cache').rglob('*.gguf'))"
        ).split()
        podman("cp", f"{first.name}:{converted}", str(tmp_path / "own.gguf"))
    tmp_path.chmod(0o755)
    (tmp_path / "own.gguf").chmod(0o644)
    mounted = f"--volume={tmp_path}:/models:ro"
    with running(image, "--model", "/models/own.gguf", options=(mounted,)) as container:
        container.wait_for("/ready")
        stream = container.execute("own", "Once upon a time", temperature=0, max_tokens=5)
        assert stream.end["tokens_out"] == 5


def test_sigterm_lets_the_stream_finish_and_exits_0(image: str) -> None:
    with running(image) as container:
        container.wait_for("/ready")
        with container.streaming("last", "Once upon a time", max_tokens=30) as response:
            chunks = response.iter_raw()
            got = [next(chunks)]
            code = container.stop()
            got += list(chunks)
        assert code == 0
        assert sse.collect(got).end["tokens_out"] > 0


def test_a_missing_model_leaves_with_code_3(image: str) -> None:
    done = subprocess.run(
        ["podman", "run", "--rm", image, "--model", "/models/absent.gguf"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3
    assert "/models/absent.gguf" in done.stderr + done.stdout


def test_the_pool_manager_outside_is_called_back(image: str) -> None:
    """From the container's network to a manager on the host, with a reachable name."""
    manager = PoolManager(host="0.0.0.0")
    threading.Thread(target=manager.serve_forever, daemon=True).start()
    url = f"http://host.containers.internal:{manager.server_port}/ready"
    flags = ("--callback-url", url, "--advertise-host", "worker-1.pool")
    try:
        with running(image, *flags) as container:
            container.wait_for("/ready")
            until(lambda: bool(manager.callbacks), container.logs)
    finally:
        manager.shutdown()
        manager.server_close()
    (call,) = manager.callbacks
    assert call.payload["uri"] == "http://worker-1.pool:8080"
    assert call.payload["backend"] == "cpu"
