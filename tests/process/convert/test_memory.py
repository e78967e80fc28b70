"""No conversion takes more memory than twice its largest tensor and 300 MB."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.convert.files import write_hollow
from tests.unit.convert.test_parity import MODELS, checkpoint
from worker.convert.safetensors import read_header

_MOST_BYTES = 300 << 20
CHILD = """
import json, re, sys
from pathlib import Path
from worker.convert import convert
from worker.convert.prepare import Options, prepare
from worker.commands.progress import Reporter

convert.prepare_checked = prepare
outtype, *sources = sys.argv[1:]
for source in map(Path, sources):
    target = source.parent / "model.gguf"
    convert.convert(source, target, Options(outtype=outtype), Reporter("none"))
    # `ru_maxrss` would begin with the memory of the tests' own process.
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps([source.name, int(peak[1]) << 10]), flush=True)
"""


def peaks(outtype: str, *sources: Path) -> list[tuple[str, int]]:
    """Convert all in one child, whose peak only grows, so that the first excess is attributed."""
    command = [sys.executable, "-c", CHILD, outtype, *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
def test_every_family_is_converted_in_little_memory(tmp_path: Path) -> None:
    rows = peaks("f32", *(checkpoint(name, tmp_path) for name in MODELS))
    print(f"{len(rows)} checkpoints, peak {rows[-1][1] >> 20} MiB")
    assert [name for name, _ in rows] == MODELS
    assert [row for row in rows if row[1] > _MOST_BYTES] == []


_ROWS = 1_638_400
"""This many rows of 64 values are 200 MiB in BF16."""
LARGE: dict[str, tuple[dict[int, int], dict[str, int]]] = {
    "llama": ({96: _ROWS}, {"intermediate_size": _ROWS, "num_hidden_layers": 1}),
    "gpt-2": ({256: _ROWS}, {"n_inner": _ROWS, "n_positions": _ROWS, "n_layer": 1}),
    "qwen3-vl-moe": (
        {48: _ROWS // 8, 96: _ROWS // 4},
        {"moe_intermediate_size": _ROWS // 8, "num_hidden_layers": 1},
    ),
}
"""A family for each path from a source tensor to the file: unchanged rows, a whole transposed
tensor, halves of each expert; with larger dimensions than in the committed checkpoint, and their
settings. One layer has enough large tensors to show whether the previous one is released."""


CASES = [
    pytest.param(
        name, outtype, marks=() if (name, outtype) == ("llama", "f32") else pytest.mark.long
    )
    for name in LARGE
    for outtype in ("f32", "q8_0")
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "outtype"), CASES)
def test_a_large_tensor_is_held_twice_at_most(name: str, outtype: str, tmp_path: Path) -> None:
    sizes, settings = LARGE[name]
    source = checkpoint(name, tmp_path)
    infos = read_header(source / "model.safetensors")
    weights = {
        info.name: tuple(sizes.get(n, n) for n in info.shape)
        for info in infos
        if ".1." not in info.name
    }
    write_hollow(source / "model.safetensors", weights.items())
    config = json.loads((source / "config.json").read_text())
    config.get("text_config", config).update(settings)
    (source / "config.json").write_text(json.dumps(config))
    largest = 2 * max(map(math.prod, weights.values()))
    ((_, peak),) = peaks(outtype, source)
    print(f"{name} to {outtype}: peak {peak >> 20} MiB, the largest tensor has {largest >> 20}")
    assert largest >= 200 << 20
    assert peak <= 2 * largest + _MOST_BYTES
