"""Gemma 3n's text part: four streams that layers predict and correct, an embedding per layer.

llama.cpp fixes most of the sizes to those of the two published models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist

import numpy as np
from gguf.constants import Keys

from worker.convert.architectures import gemma
from worker.convert.config import Config
from worker.convert.family import per_layer
from worker.convert.family.layers import HEAD_NORMS
from worker.convert.family.metadata import decoder, require, require_default_rope, rope
from worker.convert.family.rules import Array, Family, From, Metadata
from worker.convert.family.sizes import EMBD, Dims, fixed
from worker.errors import ModelError

_STREAMS, _LAUREL_RANK, _PER_LAYER = 4, 64, 256
_CACHING_LAYERS = 20
"""Layers after these read the caches of the last two of them."""
_SPARSE_LAYERS = 10


def _dims(config: Config) -> Dims:
    widths = config.values.get("intermediate_size")
    if isinstance(widths, list) and len(set(widths)) == 1:
        config = Config({**config.values, "intermediate_size": widths[0]}, config.name)
    return replace(Dims.of(config), more={"per_layer": _PER_LAYER})


def _metadata(family: Family, config: Config, d: Dims) -> Metadata:
    sliding = [kind == "sliding_attention" for kind in config.items("layer_types")]
    return {
        **decoder(family, config, d),
        **rope(family.architecture, config, d.head_dim, 1e6),
        Keys.Rope.FREQ_BASE_SWA: config.rope(
            "sliding_attention", config.number("rope_local_base_freq", default=1e4)
        ).theta,
        Keys.Attention.SLIDING_WINDOW: config.integer("sliding_window"),
        Keys.Attention.SLIDING_WINDOW_PATTERN: sliding,
        Keys.Attention.SHARED_KV_LAYERS: max(0, d.n_layers - _CACHING_LAYERS),
        Keys.LLM.FINAL_LOGIT_SOFTCAPPING: config.number("final_logit_softcapping", default=30.0),
        Keys.LLM.EMBD_LENGTH_PER_LAYER_INP: _PER_LAYER,
        Keys.LLM.ALTUP_ACTIVE_IDX: 0,
        Keys.LLM.ALTUP_NUM_INPUTS: _STREAMS,
        Keys.LLM.ACTIVATION_SPARSITY_SCALE: [
            NormalDist().inv_cdf(share) if share > 0 else float("-inf") for share in _sparsity(d)
        ],
    }


def _sparsity(d: Dims) -> list[float]:
    return [0.95 if i < _SPARSE_LAYERS else 0.0 for i in range(d.n_layers)]


def _check(config: Config, d: Dims) -> None:
    require(
        config,
        num_kv_shared_layers=max(0, d.n_layers - _CACHING_LAYERS),
        activation_sparsity_pattern=_sparsity(d),
    )
    kinds = config.items("layer_types")[_CACHING_LAYERS - 2 : _CACHING_LAYERS]
    if d.n_layers > _CACHING_LAYERS and kinds != ["sliding_attention", "full_attention"]:
        raise ModelError(
            f"{config.name}: layer_types must end the {_CACHING_LAYERS} layers that have caches "
            "with one of sliding and one of full attention, which llama.cpp lets the others read"
        )
    require_default_rope(config, d)


def _unread(_config: Config, d: Dims) -> Mapping[str, Array]:
    """What llama.cpp wants of layers that read other layers' caches, and newer checkpoints lack."""
    return {
        f"blk.{i}.attn_{name}.weight": np.zeros(shape, np.float32)
        for i in range(_CACHING_LAYERS, d.n_layers)
        for name, shape in (
            ("k", (d.kv_rows, d.n_embd)),
            ("v", (d.kv_rows, d.n_embd)),
            ("k_norm", (d.head_dim,)),
        )
    }


_STREAM = fixed(_STREAMS)
_RANK = fixed(_LAUREL_RANK)

GEMMA3N = Family(
    "gemma3n",
    ("Gemma3nForCausalLM",),
    f"{gemma.LAYER} {HEAD_NORMS} {per_layer.LAYER} altup_correct_scale altup_correct_coef"
    " altup_predict_coef altup_router altup_router_norm laurel_l laurel_r laurel_post_norm",
    model=f"token_embd output_norm output? {per_layer.MODEL} altup_proj altup_unembd_proj",
    multimodal=("Gemma3nForConditionalGeneration",),
    sources={
        **gemma.SOURCES,
        # Tokens for images and sounds have no rows there.
        "per_layer_token_embd": From("model.embed_tokens_per_layer.weight", pads_rows=True),
        "altup_proj": "model.altup_projections.{e}",
        "altup_unembd_proj": "model.altup_unembed_projections.{e}",
    },
    shapes={
        **per_layer.SHAPES,
        "altup_proj": (fixed(_STREAMS - 1), EMBD, EMBD),
        "altup_unembd_proj": (fixed(_STREAMS - 1), EMBD, EMBD),
        "altup_correct_scale": (EMBD,),
        "altup_correct_coef": (_STREAM, _STREAM),
        "altup_predict_coef": (_STREAM * _STREAM, _STREAM),
        "altup_router": (_STREAM, EMBD),
        "laurel_l": (_RANK, EMBD),
        "laurel_r": (EMBD, _RANK),
    },
    common=_metadata,
    dims=_dims,
    extra_tensors=_unread,
    requires={
        "hidden_activation": "gelu_pytorch_tanh",
        "altup_num_inputs": _STREAMS,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "laurel_rank": _LAUREL_RANK,
        "hidden_size_per_layer_input": _PER_LAYER,
        "final_logit_softcapping": 30.0,
    },
    check=_check,
)
