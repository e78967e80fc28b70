"""Gemma 4: wide heads in full-attention layers, an embedding per layer, shared caches; experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from gguf.constants import Keys

from worker.convert.architectures import gemma
from worker.convert.config import Config
from worker.convert.family.dims import Dims
from worker.convert.family.metadata import experts, if_given, norm_epsilon
from worker.convert.family.rules import Family, Metadata
from worker.errors import ModelError


def _dims(config: Config) -> Dims:
    """The sizes, and each layer's kind: `sliding` or `full` attention, its `own` or a `shared`
    cache, a `narrow` or `wide` MLP, `dense` or with `experts`."""
    d = Dims.of(config)
    n_own = d.n_layers - int(config.values.get("num_kv_shared_layers") or 0)
    widens = config.flag("use_double_wide_mlp")
    kinds = []
    for i, kind in enumerate(config.items("layer_types")):
        window = "sliding" if kind == "sliding_attention" else "full"
        cache = "own" if i < n_own else "shared"
        width = "wide" if widens and i >= n_own else "narrow"
        feed = "experts" if config.flag("enable_moe_block") else "dense"
        kinds.append(f"{window} {window}-{cache} {width} {feed}")
    more = {
        "full_dim": _of_full(config, d, "head_dim", "global_head_dim", 512),
        "full_kv": _of_full(
            config, d, "num_key_value_heads", "num_global_key_value_heads", d.n_head_kv
        ),
        "per_layer": int(config.values.get("hidden_size_per_layer_input") or 0),
    }
    d = replace(d, kinds=tuple(kinds), more=more)
    if config.flag("enable_moe_block"):
        d = replace(
            d,
            n_expert=config.integer("num_experts"),
            n_ff_expert=config.integer("moe_intermediate_size", "expert_intermediate_size"),
        )
    return d


def _of_full(config: Config, d: Dims, name: str, key: str, default: int) -> int:
    """A size of the full-attention layers; newer configurations have it by layer in
    `per_layer_config`."""
    sections = config.section("per_layer_config")
    for i, kind in enumerate(config.items("layer_types")):
        if kind == "full_attention" and sections.has(str(i)) and i < d.n_layers:
            return sections.section(str(i)).integer(name, default=default)
    if name == "num_key_value_heads" and not config.flag("attention_k_eq_v"):
        return default
    return config.integer(key, default=default)


def _metadata(family: Family, config: Config, d: Dims) -> Metadata:
    sliding = ["sliding" in kind.split() for kind in d.kinds]
    full_dim = d.more["full_dim"]
    return {
        Keys.LLM.BLOCK_COUNT: d.n_layers,
        Keys.LLM.CONTEXT_LENGTH: config.integer("max_position_embeddings"),
        Keys.LLM.EMBEDDING_LENGTH: d.n_embd,
        Keys.LLM.EMBD_LENGTH_PER_LAYER_INP: d.more["per_layer"],
        Keys.LLM.FEED_FORWARD_LENGTH: [
            2 * d.n_ff if "wide" in kind.split() else d.n_ff for kind in d.kinds
        ],
        Keys.Attention.HEAD_COUNT: d.n_head,
        Keys.Attention.HEAD_COUNT_KV: [
            d.n_head_kv if windowed else d.more["full_kv"] for windowed in sliding
        ],
        Keys.Attention.KEY_LENGTH: full_dim,
        Keys.Attention.VALUE_LENGTH: full_dim,
        Keys.Attention.KEY_LENGTH_SWA: d.head_dim,
        Keys.Attention.VALUE_LENGTH_SWA: d.head_dim,
        Keys.Attention.SHARED_KV_LAYERS: int(config.values.get("num_kv_shared_layers") or 0),
        Keys.Attention.SLIDING_WINDOW: config.integer("sliding_window"),
        Keys.Attention.SLIDING_WINDOW_PATTERN: sliding,
        Keys.Rope.DIMENSION_COUNT: full_dim,
        Keys.Rope.DIMENSION_COUNT_SWA: d.head_dim,
        Keys.Rope.FREQ_BASE: config.rope().theta,
        Keys.Rope.FREQ_BASE_SWA: config.rope("sliding_attention").theta,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
        **norm_epsilon(family, config),
        **experts(config, d, family.n_used),
    }


def _frequencies(config: Config, d: Dims) -> Mapping[str, npt.NDArray[np.float32]]:
    """Full-attention layers rotate only the first pairs of a head; a huge divisor stops the
    others."""
    half = d.more["full_dim"] // 2
    share = config.rope().params.number("partial_rotary_factor", default=0.25)
    values = np.full(half, 1e30, dtype=np.float32)
    values[: int(d.more["full_dim"] * share / 2)] = 1
    return {"rope_freqs.weight": values}


def _check(config: Config, d: Dims) -> None:
    for layers, kind in (("full_attention", "proportional"), ("sliding_attention", "default")):
        if (found := config.rope(layers).kind) != kind:
            raise ModelError(f"{config.name}: rope of {layers} is {found!r}, it must be {kind!r}")


GEMMA4 = Family(
    "gemma4",
    ("Gemma4ForCausalLM",),
    {
        "": "attn_norm attn_q attn_output attn_q_norm post_attention_norm ffn_norm ffn_gate ffn_up"
        " ffn_down post_ffw_norm layer_output_scale? inp_gate? proj? post_norm?",
        "sliding-own": "attn_k attn_v attn_k_norm",
        # Where keys serve as values, there is no value projection.
        "full-own": "attn_k attn_v? attn_k_norm",
        # A layer with a shared cache does not need these, but files may have them.
        "sliding-shared": "attn_k? attn_v? attn_k_norm?",
        "full-shared": "attn_k? attn_v? attn_k_norm?",
        "experts": "ffn_gate_inp ffn_gate_inp.scale ffn_down_exps.scale ffn_gate_up_exps"
        " ffn_down_exps post_ffw_norm_1 post_ffw_norm_2 pre_ffw_norm_2",
    },
    model="token_embd output_norm output? per_layer_token_embd? per_layer_model_proj?"
    " per_layer_proj_norm?",
    multimodal=("Gemma4ForConditionalGeneration",),
    sources={
        **gemma.SOURCES,
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    common=_metadata,
    metadata={Keys.LLM.FINAL_LOGIT_SOFTCAPPING: if_given("final_logit_softcapping")},
    n_used="top_k_experts",
    dims=_dims,
    extra_tensors=_frequencies,
    requires={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": (None, "vision"),
    },
    check=_check,
)
