"""Gemma 3n's text part: four streams that layers predict and correct, an embedding per layer.

llama.cpp fixes most of the sizes to those of the two published models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist

import numpy as np
from gguf.constants import Keys

from worker.convert.architectures import blocks, gemma, shapes
from worker.convert.architectures.gemma4 import per_layer_embeddings, text_part
from worker.convert.architectures.rules import Array, Dims, Family, Metadata, Rule, Rules, Shape
from worker.convert.config import Config
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


def _metadata(arch: str, config: Config, d: Dims) -> Metadata:
    sliding = [kind == "sliding_attention" for kind in config.items("layer_types")]
    return {
        **blocks.rms_metadata(arch, config, d),
        **blocks.rope_metadata(arch, config, d.head_dim, 1e6),
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
    blocks.require(
        config,
        hidden_activation="gelu_pytorch_tanh",
        altup_num_inputs=_STREAMS,
        altup_active_idx=0,
        altup_correct_scale=True,
        laurel_rank=_LAUREL_RANK,
        hidden_size_per_layer_input=_PER_LAYER,
        final_logit_softcapping=30.0,
        num_kv_shared_layers=max(0, d.n_layers - _CACHING_LAYERS),
        activation_sparsity_pattern=_sparsity(d),
    )
    kinds = config.items("layer_types")[_CACHING_LAYERS - 2 : _CACHING_LAYERS]
    if d.n_layers > _CACHING_LAYERS and kinds != ["sliding_attention", "full_attention"]:
        raise ModelError(
            f"{config.name}: layer_types must end the {_CACHING_LAYERS} layers that have caches "
            "with one of sliding and one of full attention, which llama.cpp lets the others read"
        )
    blocks.require_default_rope(config)


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


def _streams() -> Rules:
    """The tensors that make, mix and join the streams."""

    def of(target: str, shape: Shape) -> Rule:
        return Rule(f"blk.{{i}}.{target}.weight", shape)

    altup, laurel = f"{blocks.LAYER}.altup", f"{blocks.LAYER}.laurel"
    rules = {
        f"model.altup_{source}.{{e}}.weight": Rule(
            f"altup_{target}.weight", lambda d: (_STREAMS - 1, d.n_embd, d.n_embd)
        )
        for source, target in (("projections", "proj"), ("unembed_projections", "unembd_proj"))
    }
    return rules | {
        f"{altup}.correct_output_scale": of("altup_correct_scale", shapes.vector),
        f"{altup}.correction_coefs.weight": replace(
            of("altup_correct_coef", lambda d: (_STREAMS, _STREAMS)), keep_f32=True
        ),
        f"{altup}.prediction_coefs.weight": replace(
            of("altup_predict_coef", lambda d: (_STREAMS**2, _STREAMS)), keep_f32=True
        ),
        f"{altup}.modality_router.weight": of("altup_router", lambda d: (_STREAMS, d.n_embd)),
        f"{altup}.router_norm.weight": of("altup_router_norm", shapes.vector),
        f"{laurel}.linear_left.weight": of("laurel_l", lambda d: (_LAUREL_RANK, d.n_embd)),
        f"{laurel}.linear_right.weight": of("laurel_r", lambda d: (d.n_embd, _LAUREL_RANK)),
        f"{laurel}.post_laurel_norm.weight": of("laurel_post_norm", shapes.vector),
    }


def _padded(rules: Rules) -> Rules:
    """Pad the per-layer embedding: tokens for images and sounds have no rows there."""
    name = "model.embed_tokens_per_layer.weight"
    rule = rules[name]
    assert isinstance(rule, Rule)
    return {**rules, name: replace(rule, pads_rows=True)}


GEMMA3N = Family(
    architecture="gemma3n",
    names=("Gemma3nForCausalLM",),
    rules={
        **blocks.embeddings(),
        **gemma.norms(plus=0.0),
        **blocks.attention(biases=False),
        **blocks.head_norms(),
        **blocks.gated_mlp(),
        **_padded(per_layer_embeddings()),
        **_streams(),
    },
    metadata=_metadata,
    dims=_dims,
    extra_tensors=_unread,
    check=_check,
)

FAMILIES = (GEMMA3N, text_part(GEMMA3N, "Gemma3nForConditionalGeneration"))
