"""Starts a router from PyPI in front of some workers."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.ports import free_port
from tests.support.worker import WorkerProcess, until

ROUTERS = ("vllm-router", "sglang-router", "litellm")
KEY = f"sk-{secrets.token_hex(16)}"
"""litellm does not start without a key; the others forward it to workers that need none."""


def command(
    name: str, programs: Path, urls: Sequence[str], port: int, folder: Path, policy: str
) -> list[str]:
    """Return the command with which users start it in front of these workers."""
    if name == "vllm-router":
        flags = ["--policy", policy, "--prometheus-port", str(free_port())]
        flags += ["--health-check-interval-secs", "2", "--health-failure-threshold", "1"]
        started = [str(programs / "vllm-router"), *flags]
    elif name == "sglang-router":
        flags = ["--policy", policy, "--prometheus-port", str(free_port())]
        flags += ["--health-check-interval-secs", "2", "--health-failure-threshold", "1"]
        started = [str(programs / "python"), "-m", "sglang_router.launch_router", *flags]
    else:
        deployed = [
            {
                "model_name": "tiny-model",
                "litellm_params": {
                    "model": "openai/tiny-model",
                    "api_base": f"{url}/v1",
                    "api_key": "any",
                },
            }
            for url in urls
        ]
        settings = {"num_retries": 3, "allowed_fails": 0, "cooldown_time": 30}
        config = folder / "litellm.yaml"
        config.write_text(json.dumps({"model_list": deployed, "router_settings": settings}))
        return [
            str(programs / "litellm"),
            *("--config", str(config), "--host", "127.0.0.1", "--port", str(port)),
        ]
    return [*started, "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]


@contextmanager
def routed(
    name: str,
    programs: Path,
    workers: Sequence[WorkerProcess],
    folder: Path,
    policy: str = "round_robin",
) -> Iterator[httpx.Client]:
    """A client of a router that has found its workers."""
    port = free_port()
    urls = [worker.base_url for worker in workers]
    environment = {
        **os.environ,
        "NO_PROXY": "*",
        "LITELLM_MASTER_KEY": KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it fetches prices from the network
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
    }
    line = command(name, programs, urls, port, folder, policy)
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log, env=environment, cwd=folder)
    client = httpx.Client(
        base_url=f"http://127.0.0.1:{port}",
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=120,
        trust_env=False,
    )

    def output() -> str:
        return (folder / f"{name}.log").read_text("utf-8", "replace")[-3000:]

    def serves() -> bool:
        assert process.poll() is None, output()
        try:
            return client.get("/v1/models", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(serves, output, seconds=180)
        yield client
    finally:
        client.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
