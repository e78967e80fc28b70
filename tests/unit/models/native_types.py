"""Gives tensors of a model and of its adapter every type; prints llama.cpp's behaviour.

`python -m tests.unit.models.native_types MODEL ADAPTER SCRATCH` prints one JSON object: for each
tensor and type, the result of `outcome_of`, or "refused by us".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from tests.support.gguf_file import finish
from tests.unit.models.native_loads import outcome_of
from worker.errors import ModelError
from worker.llama import library
from worker.models.adapter import check_adapter
from worker.models.gguf.header import GgufHeader, read_header
from worker.models.gguf.servable import check_servable

TENSORS = ("blk.0.attn_q.weight", "token_embd.weight", "output_norm.weight")
FACTORS = ("blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b")


class Retyper:
    """Rewrites a file, with zeros of another type in one tensor."""

    def __init__(self, source: Path) -> None:
        self._reader = gguf.GGUFReader(source)
        fields = self._reader.fields
        self._architecture = fields["general.architecture"].contents()
        self._values = [
            (key, entry.contents(), entry.types)
            for key, entry in fields.items()
            if not key.startswith("GGUF.") and key != "general.architecture"
        ]

    def write(self, target: Path, name: str, kind: gguf.GGMLQuantizationType) -> bool:
        """Write it; returns false, without writing, if the type cannot have rows of the tensor's
        length."""
        writer = gguf.GGUFWriter(target, self._architecture)
        for key, value, (outer, *inner) in self._values:
            writer.add_key_value(key, value, outer, sub_type=inner[-1] if inner else None)
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        for tensor in self._reader.tensors:
            if tensor.name != name:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
                continue
            row, *others = tensor.shape.tolist()
            if row % per_block:
                return False
            zeros = np.zeros((*reversed(others), row // per_block * block_bytes), np.uint8)
            writer.add_tensor(name, zeros, raw_dtype=kind)
        finish(writer)
        return True


def main() -> None:
    model, adapter, scratch = map(Path, sys.argv[1:])
    base = read_header(model)
    library.load()
    outcomes: dict[str, str] = {}

    def tell(source: Path, name: str, check: Callable[[GgufHeader], None]) -> None:
        retyper = Retyper(source)
        for kind in gguf.GGMLQuantizationType:
            if retyper.write(scratch, name, kind):
                try:
                    check(read_header(scratch))
                except ModelError:
                    outcome = "refused by us"
                else:
                    files = (scratch, None) if source == model else (model, scratch)
                    outcome = outcome_of(*files)
                outcomes[f"{name} {kind.name}"] = outcome

    for name in TENSORS:
        tell(model, name, check_servable)
    for name in FACTORS:
        tell(adapter, name, lambda header: check_adapter(header, base))
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
