"""The operator's secrets reach neither the engine process nor the log."""

from __future__ import annotations

import contextlib
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from structlog.testing import capture_logs

from tests.conftest import StartWorker
from tests.support.pool_manager import serving
from tests.support.worker import until
from worker.errors import CallbackFailed
from worker.observability.metrics import Metrics
from worker.pool.client import PoolClient
from worker.settings import Settings

SECRETS = {
    "LLORCH_WORKER_TOKEN": "secret-of-clients",
    "LLORCH_CALLBACK_TOKEN": "secret-of-the-pool",
    "HF_TOKEN": "secret-of-the-hub",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-cloud",
    "LLAMA_API_KEY": "secret-of-llama-server",
    "LANGFUSE_SECRET_KEY": "secret-of-another-program",
    "HOMEBREW_GITHUB_API_TOKEN": "secret-of-one-more",
}


def test_the_engine_inherits_no_secret_and_those_in_the_pool_s_urls_are_never_logged(
    start_worker: StartWorker,
) -> None:
    with serving() as manager:
        address = urlsplit(manager.url).netloc
        url = f"http://{address}/ready?key=opensesame"
        running = start_worker("--callback-url", url, "--log-level", "debug", env=SECRETS)
        inherited = psutil.Process(running.engine_pid).environ()
        assert SECRETS.keys().isdisjoint(inherited)
        assert "secret-of" not in " ".join(inherited.values())
        assert "PATH" in inherited, "what libraries read is still there"
        manager.wait_for(n_callbacks=1)
        running.wait_log("callback.accepted")
    running.stop()
    for secret in ("hunter2", "opensesame", "secret-of"):
        assert secret not in running.stderr + running.stdout


def test_a_conversion_inherits_no_secret(start_worker: StartWorker, tmp_path: Path) -> None:
    """Its input may be hostile."""
    running = start_worker(env=SECRETS, cache_dir=tmp_path, wait_ready=False)
    inherited: dict[str, dict[str, str]] = {}

    def are_seen() -> bool:
        for process in running.children():
            with contextlib.suppress(psutil.Error, ValueError):
                _, option, module, *_ = process.cmdline()
                if option == "-m":  # otherwise it still has its parent's arguments, before its exec
                    inherited[module] = process.environ()
        return inherited.keys() >= {"worker.commands.convert", "worker.convert.tokenizer.check"}

    until(are_seen, lambda: str([*inherited]), running)
    for name, variables in inherited.items():
        assert "PATH" in variables and SECRETS.keys().isdisjoint(variables), name


@pytest.mark.anyio
async def test_the_error_of_an_unreachable_manager_has_no_secret() -> None:
    with serving() as manager:
        address = urlsplit(manager.url).netloc
    url = f"http://worker:hunter2@{address}/ready?key=opensesame"
    pool = PoolClient(Settings(callback_url=url, callback_timeout=1), Metrics("w"))

    async def nothing() -> dict[str, str]:
        return {}

    with pytest.raises(CallbackFailed) as failed, capture_logs() as lines:
        await pool.announce(nothing, lambda: False)
    await pool.close()
    output = f"{failed.value.message} {failed.value.details} {lines}"
    assert address in output and "hunter2" not in output and "opensesame" not in output


@pytest.mark.anyio
@pytest.mark.parametrize("password", ["hunter2", "hunter2#", "hun#ter2", "hunter2:"])
async def test_the_error_of_an_invalid_proxy_has_no_password(
    password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://me:{password}@127.0.0.1:nowhere")
    pool = PoolClient(Settings(callback_url="http://127.0.0.1:9/"), Metrics("w"))
    _, trouble = await pool.post("http://127.0.0.1:9/", {}, 1)
    assert "HTTP_PROXY" in trouble and "hun" not in trouble
