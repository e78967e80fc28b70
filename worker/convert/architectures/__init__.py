"""Which family a checkpoint belongs to, by `architectures` in its `config.json`."""

from __future__ import annotations

import difflib

from worker.convert.architectures.gemma import GEMMA2, GEMMA3, GEMMA3_MULTIMODAL
from worker.convert.architectures.llama import GRANITE, LLAMA, MIXTRAL, SMOLLM3
from worker.convert.architectures.others import GPT2, OLMO2, STABLELM
from worker.convert.architectures.phi import PHI3
from worker.convert.architectures.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule, Value
from worker.convert.config import Config
from worker.errors import ModelError

__all__ = ["FAMILIES", "Dims", "Family", "Metadata", "Rule", "Value", "family_of"]

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MIXTRAL,
    SMOLLM3,
    GRANITE,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    GEMMA2,
    GEMMA3,
    GEMMA3_MULTIMODAL,
    PHI3,
    OLMO2,
    STABLELM,
    GPT2,
)


def family_of(config: Config) -> Family:
    names = config.items("architectures")
    known = {name: family for family in FAMILIES for name in family.names}
    for name in names:
        if name in known:
            return known[name]
    name = str(names[0]) if names else "none"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ModelError(
        f"architecture {name} cannot be converted; the nearest known one is {near[0]}, "
        f"all are: {', '.join(sorted(known))}",
        architecture=name,
    )
