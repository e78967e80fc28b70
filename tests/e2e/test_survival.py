"""Two rounds of killing the engine under eight streams; `tests.e2e.survival` runs any number."""

from __future__ import annotations

from pathlib import Path

from tests.e2e import survival


def test_eight_streams_outlive_their_engine(warm_cache: Path, tmp_path: Path) -> None:
    figures = survival.run(2, tmp_path / "worker", warm_cache)
    assert figures.streams == 2 * survival.N_STREAMS
    assert figures.broken == [] and figures.unequal_before == [], figures
    assert figures.equal > 0, figures
