"""The types of the KV cache and the settings of positions in llama.cpp."""

from __future__ import annotations

import ctypes
from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.bundled import bundled_gguf
from worker.llama import library
from worker.llama.batch import Batch
from worker.llama.context import Context, ContextOptions
from worker.llama.model import Model
from worker.settings import Settings
from worker.wire.engine_settings import KvType


def logits(options: ContextOptions) -> npt.NDArray[np.float32]:
    """Return the logits after forty tokens of the bundled model."""
    model = Model(str(bundled_gguf("f32")))
    context, batch = Context(model, options), Batch(40)
    try:
        batch.add(0, 0, list(range(5, 45)), logits=True)
        assert context.decode(batch) == "ok"
        return context.logits(39).copy()
    finally:
        context.close()
        model.close()


def test_each_type_has_ggmls_number() -> None:
    name_of = ctypes.CDLL("libllama", handle=library.load()._lib._handle).ggml_type_name
    name_of.restype = ctypes.c_char_p
    for name in get_args(KvType):
        assert name_of(library.type_numbers()[name.upper()]).decode() == name


@pytest.mark.parametrize("keys", get_args(KvType))
def test_each_type_computes_nearly_the_same(keys: KvType) -> None:
    exact = logits(ContextOptions(n_ctx=64, kv_types=("f32", "f32")))
    for values in get_args(KvType):
        options = ContextOptions(n_ctx=64, kv_types=(keys, values), flash_attention="on")
        near = logits(options)
        assert float(np.corrcoef(exact, near)[0, 1]) > 0.98, (keys, values)


def test_rope_settings_are_llama_cpps_own() -> None:
    plain = logits(ContextOptions(n_ctx=64))
    base = Settings.load("cpu", {"rope_freq_base": 10000.0}).engine.rope
    assert base == (("rope_freq_base", 10000.0),)
    assert np.array_equal(logits(ContextOptions(n_ctx=64, rope=base)), plain)
    flags = {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_orig_ctx": 64}
    settings = Settings.load("cpu", flags)
    stretched = dict(settings.engine.rope)
    assert stretched == {"rope_scaling_type": 2, "rope_freq_scale": 0.25, "yarn_orig_ctx": 64}
    assert not np.allclose(logits(ContextOptions(n_ctx=64, rope=settings.engine.rope)), plain)
    names = {name for name, _ in library.load().llama_context_params._fields_}
    assert stretched.keys() <= names
