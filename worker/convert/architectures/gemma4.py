"""Gemma 4: wide heads in full-attention layers, an embedding per layer, shared caches; experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family.dims import Dims
from worker.convert.family.metadata import counted, if_given, local_theta, of_dims
from worker.convert.family.rules import Array, Family, Into, Setting
from worker.convert.quantize import to_float32


def _config(config: Config) -> Config:
    """As in the model's class, the last layer has full attention, and without `layer_types` every
    sixth layer, too."""
    full = "full_attention"
    if config.has("layer_types"):
        kinds = config.items("layer_types")
    else:
        layers = range(1, config.integer("num_hidden_layers") + 1)
        kinds = ["sliding_attention" if i % 6 else full for i in layers]
    return config.changed(layer_types=[*kinds[:-1], full])


def _dims(config: Config) -> Dims:
    """The sizes, and each layer's kind: `sliding` or `full` attention, its `own` or a `shared`
    cache, a `narrow` or `wide` MLP, `dense` or with `experts`."""
    d = Dims.of(config)
    n_own = d.n_layers - config.count("num_kv_shared_layers")
    widens = config.flag("use_double_wide_mlp")
    kinds = []
    for i, kind in enumerate(config.items("layer_types")):
        window = "sliding" if kind == "sliding_attention" else "full"
        cache = "own" if i < n_own else "shared"
        width = "wide" if widens and i >= n_own else "narrow"
        feed = "experts" if config.flag("enable_moe_block") else "dense"
        kinds.append(f"{window} {window}-{cache} {width} {feed}")
    extra = {
        "full_dim": _of_full(config, d, "head_dim", "global_head_dim", 512),
        "full_kv": _of_full(
            config, d, "num_key_value_heads", "num_global_key_value_heads", d.n_head_kv
        ),
    }
    d = replace(d, kinds=tuple(kinds), extra=extra)
    if config.flag("enable_moe_block"):
        d = replace(
            d,
            n_expert=config.integer("num_experts"),
            n_ff_expert=config.integer("moe_intermediate_size", "expert_intermediate_size"),
        )
    return d


def _of_full(config: Config, d: Dims, name: str, key: str, default: int) -> int:
    """A size of the full-attention layers; newer configurations give it by layer in
    `per_layer_config`."""
    sections = config.section("per_layer_config")
    for i, kind in enumerate(config.items("layer_types")):
        if kind == "full_attention" and sections.has(str(i)) and i < d.n_layers:
            return sections.section(str(i)).integer(name, default=default)
    if name == "num_key_value_heads" and not config.flag("attention_k_eq_v"):
        return default
    return config.integer(key, default=default)


_FULL_DIM = of_dims(lambda d: d.extra["full_dim"])
_HEAD_DIM = of_dims(lambda d: d.head_dim)


def _each(of_layer: Callable[[Dims, set[str]], int]) -> Setting:
    """A list with a number for each layer, computed from the words of its kind."""
    return lambda config, d: [of_layer(d, set(kind.split())) for kind in d.kinds]


def _frequencies(config: Config, d: Dims) -> Mapping[str, npt.NDArray[np.float32]]:
    """Full-attention layers rotate only the first pairs of a head; a huge divisor stops the
    others."""
    half = d.extra["full_dim"] // 2
    share = config.rope().params.number("partial_rotary_factor", default=0.25)
    values = np.full(half, 1e30, dtype=np.float32)
    values[: int(d.extra["full_dim"] * share / 2)] = 1
    return {"rope_freqs.weight": values}


def _both(sources: Sequence[Array], _d: Dims) -> Array:
    return np.concatenate([to_float32(each) for each in sources])


GEMMA4 = Family(
    "gemma4",
    ("Gemma4ForCausalLM",),
    multimodal=("Gemma4ForConditionalGeneration",),
    sources={
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps",
        # As quantisers save them.
        "experts.gate_proj.weight": Into("ffn_gate_up_exps", ("up_proj.weight",), make=_both),
        "experts.up_proj.weight": (),
        "experts.down_proj.weight": "ffn_down_exps",
    },
    metadata={
        Keys.LLM.EMBD_LENGTH_PER_LAYER_INP: counted("hidden_size_per_layer_input"),
        Keys.LLM.FEED_FORWARD_LENGTH: _each(lambda d, kind: d.n_ff * (2 if "wide" in kind else 1)),
        Keys.Attention.HEAD_COUNT_KV: _each(
            lambda d, kind: d.n_head_kv if "sliding" in kind else d.extra["full_kv"]
        ),
        Keys.Attention.KEY_LENGTH: _FULL_DIM,
        Keys.Attention.VALUE_LENGTH: _FULL_DIM,
        Keys.Attention.KEY_LENGTH_SWA: _HEAD_DIM,
        Keys.Attention.VALUE_LENGTH_SWA: _HEAD_DIM,
        Keys.Attention.SHARED_KV_LAYERS: counted("num_kv_shared_layers"),
        Keys.Rope.DIMENSION_COUNT: _FULL_DIM,
        Keys.Rope.DIMENSION_COUNT_SWA: _HEAD_DIM,
        Keys.Rope.FREQ_BASE_SWA: local_theta("rope_theta"),
        Keys.LLM.FINAL_LOGIT_SOFTCAPPING: if_given("final_logit_softcapping"),
    },
    windows=1,
    ropes=("proportional",),
    n_used="top_k_experts",
    config=_config,
    dims=_dims,
    extra_tensors=_frequencies,
    requires={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "use_bidirectional_attention": (None, "vision"),
    },
    needs=lambda config: (
        "layer_output_scale attn_v" + " ffn_down_exps.scale" * config.flag("enable_moe_block")
    ),
)
