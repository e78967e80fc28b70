"""Streams survive their engines, in a few seconds of chaos and in two hundred rounds of kills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import chaos, survival


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_eight_streams_outlive_two_hundred_engines(warm_cache: Path, tmp_path: Path) -> None:
    figures = survival.run(200, tmp_path / "worker", warm_cache)
    print(survival.shown(figures))
    assert figures.streams == 200 * survival.N_STREAMS
    assert figures.broken == [] and figures.wrong == [], figures


SECONDS = 6
FDS_OF_LIVE_STREAMS = 2 * chaos.N_CLIENTS
"""Connections, of clients and of the manager, that may be open when they are counted."""


def test_a_little_chaos(warm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "WARM_UP_SECONDS", 2)
    figures = chaos.run(SECONDS, tmp_path / "worker", warm_cache, seed=1, n_attacks=2)
    shown = json.dumps(figures.summary(), indent=1, ensure_ascii=False)
    assert figures.lost == [], shown
    assert figures.wrong == [], shown
    assert sum(figures.attacks.values()) >= 2, shown
    assert figures.n_recoveries == sum(figures.attacks.values()), shown
    assert figures.outcomes["end"] > 10, shown
    assert figures.twice == [], shown
    assert figures.survivors > 0, shown
    # Only a request that was being worked on at two crashes ends with one.
    assert figures.outcomes["error ENGINE_CRASHED"] <= figures.survivors / 10, shown
    assert figures.accepted_by_worker == figures.ended_by_worker, shown
    assert figures.heartbeat_breaches == [], shown
    assert figures.ready_at_the_end and figures.engines == 1, shown
    assert figures.fds[1] <= figures.fds[0] + FDS_OF_LIVE_STREAMS, shown
    assert figures.rss_mib[1] <= figures.rss_mib[0] + 40, shown
