"""Overrides for what a model file says, as arrays for llama.cpp.

The caller keeps an array alive until the model is loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any


def tensor_overrides(placement: Sequence[tuple[str, int]]) -> Any:
    """llama.cpp's array of `{pattern, buffer type}`, terminated by an empty pattern."""
    if not placement:
        return None

    class Override(ctypes.Structure):
        _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]

    overrides = (Override * (len(placement) + 1))()
    for entry, (pattern, buffer_type) in zip(overrides, placement, strict=False):
        entry.pattern, entry.buffer_type = pattern.encode(), buffer_type
    return overrides


def metadata_overrides(flat: Any, values: Mapping[str, int | str]) -> Any:
    """llama.cpp's array of metadata that replaces the file's, terminated by an empty key."""
    overrides = (flat.llama_model_kv_override * (len(values) + 1))()
    for each, (key, value) in zip(overrides, values.items(), strict=False):
        each.key = key.encode()
        if isinstance(value, str):
            each.tag, each.value.val_str = flat.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()
        else:
            each.tag, each.value.val_i64 = flat.LLAMA_KV_OVERRIDE_TYPE_INT, value
    return overrides
