"""Heartbeats of a real worker: the whole state each time, despite failures, with a final one."""

from __future__ import annotations

import re
import signal
import threading
import time
from itertools import pairwise
from typing import Any

from tests import ROOT
from tests.conftest import StartWorker
from tests.support import clock
from tests.support.held import mid_stream
from tests.support.pool_manager import (
    always,
    answer_ok,
    answers_garbage,
    hangs,
    hangs_up,
    serving,
)
from tests.support.worker import WorkerProcess, until


def busy(running: WorkerProcess, stop: threading.Event) -> threading.Thread:
    def work() -> None:
        while not stop.is_set():
            running.execute("One day", max_tokens=200, ignore_eos=True)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_heartbeats_go_from_loading_to_draining_in_sequence(start_worker: StartWorker) -> None:
    stop = threading.Event()
    with serving() as manager:
        running = start_worker(*manager.flags(), "--worker-id", "w-2", wait_ready=False)
        manager.wait_for_status("ready")
        thread = busy(running, stop)
        manager.wait_for_status("busy")
        seen = len(manager.beats)
        manager.wait_for(n_beats=seen + 3)
        stop.set()
        thread.join(60)
        assert running.stop() == 0
        manager.wait_for_status("draining")  # the manager counts a message after its answer
        assert manager.statuses[0] == "loading" and manager.statuses[-1] == "draining"
        assert manager.verdict() == []
        beats = [message.payload for message in manager.beats]
    # One that is in flight when the last is due is given up, and may not have arrived.
    numbers = [beat["sequence"] for beat in beats if beat["status"] != "draining"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {beat["worker_id"] for beat in beats} == {"w-2"}
    assert {beat["incarnation"] for beat in beats} == {
        message.payload["incarnation"] for message in manager.callbacks
    }
    assert max(beat["running"] for beat in beats) == 1
    assert max(beat["kv_cells_used"] for beat in beats) > 0
    assert beats[-1]["resident"] is True and beats[-1]["uri"] == running.base_url


def test_a_crash_a_recovery_and_a_drain_are_reported_at_once(start_worker: StartWorker) -> None:
    """A crash, the recovery and a drain, although the next heartbeat is due in a minute."""
    with serving() as manager:
        running = start_worker(*manager.heartbeat_flags(interval_s=60), can_be_held=True)
        manager.wait_for_status("ready")
        running.kill_engine()
        until(
            lambda: "recovering" in [m.payload["state"] for m in manager.beats],
            lambda: str(manager.statuses),
        )
        until(lambda: manager.statuses[-1] == "ready", lambda: str(manager.statuses))
        running.wait_ready()
        # The drain lasts.
        with mid_stream(running, "One day", max_tokens=100, ignore_eos=True) as reading:
            before = time.monotonic()
            running.signal(signal.SIGTERM)
            manager.wait_for_status("draining")
            assert clock.in_time(before, 30)
            running.hold.unlink()
            assert reading.rest().end
        assert running.wait() == 0
        assert manager.verdict() == []


def troubles(running: WorkerProcess) -> list[str]:
    """Return the logged failures of the manager, one for each change; empty if all is well."""
    events = ("heartbeat.failed", "heartbeat.recovered")
    return [each.get("reason", "") for each in running.logs() if each.get("event") in events]


def test_a_manager_in_trouble_never_stops_serving(start_worker: StartWorker) -> None:
    """It does not delay a stop, either, and each of its different failures is logged once, such as
    a 500, and later a 401 because the token is wrong."""
    with serving() as manager:
        running = start_worker(*manager.heartbeat_flags())
        manager.wait_for_status("ready")

        replies: list[Any] = [always(500), answers_garbage, hangs_up, hangs]
        for reply in replies:
            manager.reply = reply
            until(lambda: troubles(running)[-1:] not in ([], [""]), lambda: running.stderr)
            assert running.execute("Once", max_tokens=5, ignore_eos=True).end["tokens_out"] >= 1
            assert running.is_ready() and running.get("/health").status_code == 200
            manager.reply = answer_ok
            until(lambda: troubles(running)[-1] == "", lambda: running.stderr)
        assert running.metric('worker_heartbeats_total{result="failed"}') >= len(replies)
        for reply, words in ((always(500), " 500"), (always(401), " 401"), (hangs, "no answer")):
            manager.reply = reply
            # On a busy machine there may be a late answer before it.
            until(lambda words=words: words in troubles(running)[-1], lambda: running.stderr)
        assert running.stop() == 0
    assert all(one != other for one, other in pairwise(troubles(running)))


def test_each_heartbeat_has_the_whole_state(start_worker: StartWorker) -> None:
    with serving() as manager:
        port = int(manager.server_address[1])
        running = start_worker(*manager.flags())
        manager.wait_for(n_callbacks=1, n_beats=2)
        manager.wait_for_status("ready")
        before = manager.beats[-1].payload
    # Of several addresses each reason is logged, and not "all connection attempts failed".
    until(lambda: "[Errno 111]" in "".join(troubles(running)[-1:]), lambda: running.stderr)
    assert running.execute("Once", max_tokens=3, ignore_eos=True).end["tokens_out"] >= 1
    with serving(port) as manager:
        manager.wait_for(n_beats=1)
        beat = manager.beats[0].payload
        page = (ROOT / "docs/pool-and-fleet.md").read_text("utf-8")
        rows = re.findall(r"^\| (`.+?) \|", page.partition("### What it sends")[2], re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", " ".join(rows))) == set(beat), "the page has each field"
        static = ("worker_id", "incarnation", "uri", "model_ref", "slots", "vram_bytes", "device")
        assert {key: beat[key] for key in static} == {key: before[key] for key in static}
        assert beat["sequence"] > before["sequence"]
        assert running.stop() == 0
        manager.wait_for_status("draining")
        assert manager.statuses[-1] == "draining"
