"""Finds the family of a checkpoint by `architectures` in its `config.json`."""

from __future__ import annotations

import difflib

from worker.convert.architectures import (
    apertus,
    cohere,
    deepseek,
    encoders,
    ernie,
    exaone,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt2,
    gpt_oss,
    granite,
    lfm2,
    llama,
    llama4,
    nemotron,
    nemotron_h,
    olmo,
    phi,
    qwen,
    qwen_linear,
    rwkv,
    stablelm,
    starcoder2,
    state_space,
)
from worker.convert.architectures.blocks import llama3_factors
from worker.convert.architectures.rules import Family
from worker.convert.config import Config
from worker.errors import ModelError

_TABLES = (
    *(apertus, cohere, deepseek, encoders, ernie, exaone, gemma, gemma3n, gemma4, glm),
    *(gpt2, gpt_oss, granite, lfm2, llama, llama4, nemotron, nemotron_h),
    *(olmo, phi, qwen, qwen_linear, rwkv, stablelm, starcoder2, state_space),
)
FAMILIES: tuple[Family, ...] = tuple(family for table in _TABLES for family in table.FAMILIES)


def check_rope(family: Family, config: Config) -> None:
    """Refuse Llama 3's rope scaling if llama.cpp reads its factors in other families only."""
    if family.extra_tensors is not llama3_factors and config.rope().kind == "llama3":
        raise ModelError(
            f"{config.name}: rope scaling of type 'llama3' is not known for "
            f"{family.architecture}; llama.cpp reads its factors in other families alone"
        )


def family_of(config: Config) -> Family:
    names = config.items("architectures")
    known = {name for family in FAMILIES for name in family.names}
    for name in known.intersection(map(str, names)):
        for family in FAMILIES:
            if name in family.names and family.applies(config):
                return family
    name = str(names[0]) if names else "none"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ModelError(
        f"architecture {name} cannot be converted; the nearest known one is {near[0]}, "
        f"all are: {', '.join(sorted(known))}",
        architecture=name,
    )
