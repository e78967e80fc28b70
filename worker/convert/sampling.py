"""Reads the default sampling of `generation_config.json` into the keys that a GGUF has for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf.constants import Keys

from worker.convert.checkpoint import Checkpoint
from worker.convert.family.rules import Metadata, Typed

_NUMBERS = {
    "temperature": Keys.General.SAMPLING_TEMP,
    "top_p": Keys.General.SAMPLING_TOP_P,
    "min_p": Keys.General.SAMPLING_MIN_P,
}
"""Settings that mean the same to transformers and llama.cpp. A `repetition_penalty` does not:
transformers applies it to the whole text, llama.cpp to the last tokens."""


def sampling(checkpoint: Checkpoint) -> Metadata:
    """The `general.sampling.*` keys; none if `do_sample` is false, because transformers then
    ignores the numbers."""
    settings = checkpoint.json("generation_config.json")
    if settings.get("do_sample") is False:
        return {}
    found: Metadata = {
        key: float(settings[name]) for name, key in _NUMBERS.items() if _is_number(settings, name)
    }
    if _is_number(settings, "top_k"):
        found[Keys.General.SAMPLING_TOP_K] = Typed(int(settings["top_k"]), "int32")
    return found


def _is_number(settings: Mapping[str, Any], name: str) -> bool:
    value = settings.get(name)
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**31
