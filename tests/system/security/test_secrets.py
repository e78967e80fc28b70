"""What the operator keeps secret reaches neither the engine process nor the log."""

from __future__ import annotations

from urllib.parse import urlsplit

import psutil

from tests.conftest import StartWorker
from tests.support.pool_manager import serving

SECRETS = {
    "LLORCH_WORKER_TOKEN": "secret-of-clients",
    "LLORCH_CALLBACK_TOKEN": "secret-of-the-pool",
    "HF_TOKEN": "secret-of-the-hub",
    "AWS_SECRET_ACCESS_KEY": "secret-of-the-cloud",
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
    lost = f"http://worker:hunter2@{address}/ready?key=opensesame"
    again = start_worker(
        *("--callback-url", lost, "--heartbeat-url", lost),
        *("--callback-timeout", "1", "--callback-optional"),
    )
    again.wait_log("callback.given_up")
    for each in (running, again):
        each.stop()
        assert "hunter2" not in each.stderr + each.stdout
        assert "opensesame" not in each.stderr + each.stdout
        assert "secret-of" not in each.stderr + each.stdout
