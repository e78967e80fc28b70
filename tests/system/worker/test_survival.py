"""Rounds of killing the engine under eight streams; `tools.survival` runs any number."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import survival


def test_eight_streams_outlive_their_engine(warm_cache: Path, tmp_path: Path) -> None:
    figures = survival.run(2, tmp_path / "worker", warm_cache)
    assert figures.streams == 2 * survival.N_STREAMS
    assert figures.broken == [] and figures.wrong == [], figures
    assert figures.equal > 0, figures


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_eight_streams_outlive_two_hundred_engines(warm_cache: Path, tmp_path: Path) -> None:
    figures = survival.run(200, tmp_path / "worker", warm_cache)
    print(survival.shown(figures))
    assert figures.streams == 200 * survival.N_STREAMS
    assert figures.broken == [] and figures.wrong == [], figures
