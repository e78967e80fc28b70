"""Loads damaged copies of a GGUF in llama.cpp, each in a process of its own; prints what happened.

`python -m tests.unit.models.native_loads MODEL SCRATCH N [ADAPTER]`: N random changes of one byte
of the header, then each number of the metadata at its extremes and with its high bits changed (all
of them only if N is large). With an adapter the adapter's header is damaged instead of the model's.
Only files that pass our own checks are loaded. Prints one JSON object: outcomes by name, and a
description of each that died by a signal.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from worker.errors import ModelError, VramOom
from worker.llama import library
from worker.llama.batch import Batch
from worker.llama.context import Context, ContextOptions
from worker.llama.model import Model
from worker.models.adapter import check_adapter
from worker.models.gguf.header import GgufHeader, read_header
from worker.models.gguf.servable import check_servable

EXTREMES: dict[str, tuple[str, tuple[float, ...]]] = {
    "uint16": ("<H", (0, 1, 2**16 - 1)),
    "uint32": ("<I", (0, 1, 3, 513, 2**31 - 1, 2**32 - 1)),
    "int32": ("<i", (0, -1, 2**31 - 1)),
    "float32": ("<f", (0.0, -1.0, -1e-9, 1e38, float("nan"), float("inf"))),
    "bool": ("<B", (0, 1)),
}
MANY = 1000


def value_places(raw: bytes | bytearray, header: GgufHeader) -> Iterator[tuple[str, str, int]]:
    """Yield key, type and offset of each value that is not an array."""
    position = 24
    for key, kind in header.types.items():
        position += 8 + struct.unpack_from("<Q", raw, position)[0] + 4
        if kind == "array":
            array = header.arrays[key]
            position = array.offset
            for _ in range(array.length):
                if array.item_type == "string":
                    position += 8 + struct.unpack_from("<Q", raw, position)[0]
                else:
                    position += struct.calcsize(EXTREMES[array.item_type][0])
        elif kind == "string":
            position += 8 + struct.unpack_from("<Q", raw, position)[0]
        else:
            yield key, kind, position
            position += struct.calcsize(EXTREMES[kind][0])


def damaged(source: Path, target: Path, key: str, byte: int) -> Path:
    """Return a copy of a GGUF with another first byte of one value."""
    header, raw = read_header(source), bytearray(source.read_bytes())
    raw[next(place for each, _, place in value_places(raw, header) if each == key)] = byte
    target.write_bytes(raw)
    return target


def damages(raw: bytes, header: GgufHeader, count: int) -> Iterator[tuple[str, int, bytes]]:
    """Yield what to change, where, and to which bytes."""
    draw = random.Random(20)
    for _ in range(count):
        place = draw.randrange(4, header.tensors[0].offset)
        yield f"byte {place}", place, bytes([raw[place] ^ (1 << draw.randrange(8))])
    for key, kind, place in value_places(raw, header):
        form, values = EXTREMES[kind]
        for value in values if count >= MANY else values[::2]:
            changed = struct.pack(form, int(value) if form != "<f" else value)
            yield f"{key} = {value}", place, changed
        if kind in ("uint32", "int32"):
            for bit in range(16, 32) if count >= MANY else (16, 31):
                high = place + bit // 8
                yield f"{key} with bit {bit} changed", high, bytes([raw[high] ^ (1 << bit % 8)])


def load_and_decode(file_or_model: Path | Model, adapter_path: Path | None) -> None:
    """Load and decode; the exit code is 0 if it decoded, 3 if it was refused."""
    try:
        model = file_or_model if isinstance(file_or_model, Model) else Model(str(file_or_model))
        if adapter_path is not None:
            model.load_adapter(str(adapter_path))
        context = Context(model, ContextOptions(n_ctx=64, n_batch=32, n_ubatch=32))
        context.apply(tuple((number, 1.0) for number in range(len(model.adapters))))
    except (ModelError, VramOom):
        os._exit(3)
    batch = Batch(32)
    tokens = model.tokenize("Once upon a time", add_special=True, parse_special=True)[:32]
    if tokens:
        batch.add(0, 0, tokens, logits=True)
        context.decode(batch)
    os._exit(0)


def outcome_of(model: Path | Model, adapter: Path | None = None) -> str:
    """Return the outcome in llama.cpp in a separate process, with files or with a loaded model."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(120)
        load_and_decode(model, adapter)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"died of signal {os.WTERMSIG(status)}"
    return "decoded" if os.WEXITSTATUS(status) == 0 else "refused by llama.cpp"


def main() -> None:
    model, scratch, count = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    adapter = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    source, base = adapter or model, read_header(model)
    raw, header = source.read_bytes(), read_header(source)
    library.load()
    loaded = model if adapter is None else Model(str(model))
    outcomes: Counter[str] = Counter()
    died: list[str] = []
    for what, place, changed in damages(raw, header, count):
        scratch.write_bytes(raw[:place] + changed + raw[place + len(changed) :])
        try:
            if adapter is None:
                check_servable(read_header(scratch))
            else:
                check_adapter(read_header(scratch), base)
        except ModelError:
            outcomes["refused by us"] += 1
            continue
        outcome = outcome_of(scratch) if adapter is None else outcome_of(loaded, scratch)
        outcomes[outcome] += 1
        if outcome.startswith("died"):
            died.append(f"{what}: {outcome}")
    print(json.dumps({"outcomes": outcomes, "died": died}))


if __name__ == "__main__":
    main()
