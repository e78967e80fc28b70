"""The record of the engine's current work is in memory, where no disk can fail."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from worker.wire.black_box import DRAFT, LOOP, MODEL, PROJECTOR, BlackBox


@pytest.mark.skipif(sys.platform != "linux", reason="it is a temporary file elsewhere")
def test_no_folder_for_temporary_files_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    file = BlackBox.create_file()
    parent, child = BlackBox(file), BlackBox(file)
    os.close(file)
    child.in_hand[LOOP] = 7
    assert parent.suspects == {7}


def test_each_computing_part_has_its_own_pulse() -> None:
    box = BlackBox()
    seen = {box.pulses}
    for part in (MODEL, DRAFT, PROJECTOR, DRAFT):
        pulse = box.pulse_memory(part).cast("q")
        pulse[0] += 1
        seen.add(box.pulses)
    assert len(seen) == 5 and not box.suspects
