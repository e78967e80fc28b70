"""The cost of an open page without requests: under 1 % of a core, in worker and browser."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.worker import WorkerProcess, computed_s
from tests.system.page.watching import hide

pytestmark = pytest.mark.long
SECONDS = 20.0


def page_seconds(session: Any) -> float:
    """Return the busy time of the page's main thread so far."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(m["value"] for m in metrics if m["name"] == "TaskDuration"))


@pytest.mark.parametrize("seen", [True, False], ids=["visible", "hidden"])
def test_an_open_page_costs_next_to_nothing(page: Any, worker: WorkerProcess, seen: bool) -> None:
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    worker.wait_idle()
    if not seen:
        hide(page)
    page.wait_for_timeout(1000)
    before = computed_s(worker.processes), page_seconds(session)
    page.wait_for_timeout(1000 * SECONDS)
    in_worker = (computed_s(worker.processes) - before[0]) / SECONDS
    in_page = (page_seconds(session) - before[1]) / SECONDS
    print(f"{in_worker:.2%} of a core in the worker, {in_page:.2%} in the page")
    assert in_worker < 0.01 and in_page < 0.01
