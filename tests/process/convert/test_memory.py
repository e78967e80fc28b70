"""No family takes more memory than twice its largest tensor and 300 MB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.convert.test_parity import MODELS

_MOST_BYTES = 300 << 20
CHILD = """
import json, resource, sys
from pathlib import Path
from tests.unit.convert.test_parity import checkpoint
from worker.convert import convert
from worker.convert.prepare import Options, prepare
from worker.commands.progress import Reporter

convert.prepare_checked = prepare
for name in sys.argv[2:]:
    source, target = checkpoint(name, Path(sys.argv[1])), Path(sys.argv[1]) / f"{name}.gguf"
    convert.convert(source, target, Options(outtype="f32"), Reporter("none"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    largest = max(p.stat().st_size for p in source.glob("*.safetensors"))
    print(json.dumps([name, peak, largest]), flush=True)
"""


@pytest.mark.long
def test_every_family_is_converted_in_little_memory(tmp_path: Path) -> None:
    """In one child, whose peak only grows, so the first that takes too much is named."""
    command = [sys.executable, "-c", CHILD, str(tmp_path), *MODELS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    print(f"{len(rows)} checkpoints, peak {rows[-1][1] >> 20} MiB")
    assert [name for name, *_ in rows] == MODELS
    assert [row for row in rows if row[1] > _MOST_BYTES + 2 * row[2]] == []
