"""Gemma 4: wide heads in full-attention layers, an embedding per layer, shared caches; experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from gguf.constants import Keys

from worker.convert.architectures import blocks, experts, gemma, shapes
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule, Rules, Shape
from worker.convert.config import Config
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


def _attention() -> Rules:
    def by_window(target: str, shape: Shape) -> tuple[Rule, Rule]:
        def full(d: Dims) -> tuple[int, ...]:
            return shape(replace(d, head_dim=d.more["full_dim"], n_head_kv=d.more["full_kv"]))

        name = f"blk.{{i}}.{target}.weight"
        return Rule(name, shape, on="sliding"), Rule(name, full, on="full")

    def by_cache(rules: Iterable[Rule]) -> tuple[Rule, ...]:
        """A layer with a shared cache does not need the tensor, but files may have it."""
        return tuple(
            replace(rule, on=f"{rule.on}-{cache}", optional=rule.optional or cache == "shared")
            for rule in rules
            for cache in ("own", "shared")
        )

    name = blocks.ATTENTION
    sliding_v, full_v = by_window("attn_v", lambda d: (d.kv_rows, d.n_embd))
    return {
        f"{name}.q_proj.weight": by_window("attn_q", lambda d: (d.q_rows, d.n_embd)),
        f"{name}.o_proj.weight": by_window("attn_output", lambda d: (d.n_embd, d.q_rows)),
        f"{name}.q_norm.weight": by_window("attn_q_norm", lambda d: (d.head_dim,)),
        f"{name}.k_proj.weight": by_cache(by_window("attn_k", lambda d: (d.kv_rows, d.n_embd))),
        # Where keys serve as values, there is no value projection.
        f"{name}.v_proj.weight": by_cache((sliding_v, replace(full_v, optional=True))),
        f"{name}.k_norm.weight": by_cache(by_window("attn_k_norm", lambda d: (d.head_dim,))),
    }


def _feed_forward() -> Rules:
    def both(target: str, shape: Shape) -> tuple[Rule, ...]:
        def wide(d: Dims) -> tuple[int, ...]:
            return shape(replace(d, n_ff=2 * d.n_ff))

        name = f"blk.{{i}}.{target}.weight"
        return Rule(name, shape, on="narrow"), Rule(name, wide, on="wide")

    return {
        f"{blocks.MLP}.gate_proj.weight": both("ffn_gate", shapes.up),
        f"{blocks.MLP}.up_proj.weight": both("ffn_up", shapes.up),
        f"{blocks.MLP}.down_proj.weight": both("ffn_down", shapes.down),
    }


def _experts() -> Rules:
    """The experts, which these layers have in addition to the dense block."""
    layer = blocks.LAYER
    return experts.only(
        "experts",
        {
            **experts.router(f"{layer}.router.proj.weight"),
            f"{layer}.router.scale": Rule("blk.{i}.ffn_gate_inp.scale", shapes.vector),
            f"{layer}.router.per_expert_scale": Rule(
                "blk.{i}.ffn_down_exps.scale", lambda d: (d.n_expert,)
            ),
            f"{layer}.experts.gate_up_proj": Rule(
                "blk.{i}.ffn_gate_up_exps.weight",
                lambda d: (d.n_expert, 2 * d.n_ff_expert, d.n_embd),
            ),
            f"{layer}.experts.down_proj": Rule("blk.{i}.ffn_down_exps.weight", experts.down),
            **blocks.norms(
                post_feedforward_layernorm_1="post_ffw_norm_1",
                post_feedforward_layernorm_2="post_ffw_norm_2",
                pre_feedforward_layernorm_2="pre_ffw_norm_2",
            ),
        },
    )


def per_layer_embeddings() -> Rules:
    """A second embedding, from which every layer adds its part; larger models have none."""

    def width(d: Dims) -> int:
        return d.n_layers * d.more["per_layer"]

    layer = blocks.LAYER
    rules = {
        "model.embed_tokens_per_layer.weight": Rule(
            "per_layer_token_embd.weight", lambda d: (d.n_vocab, width(d))
        ),
        "model.per_layer_model_projection.weight": Rule(
            "per_layer_model_proj.weight", lambda d: (width(d), d.n_embd)
        ),
        "model.per_layer_projection_norm.weight": Rule(
            "per_layer_proj_norm.weight", lambda d: (d.more["per_layer"],)
        ),
        f"{layer}.per_layer_input_gate.weight": Rule(
            "blk.{i}.inp_gate.weight", lambda d: (d.more["per_layer"], d.n_embd)
        ),
        f"{layer}.per_layer_projection.weight": Rule(
            "blk.{i}.proj.weight", lambda d: (d.n_embd, d.more["per_layer"])
        ),
        f"{layer}.post_per_layer_input_norm.weight": blocks.norm("blk.{i}.post_norm"),
    }
    return {source: replace(rule, optional=True) for source, rule in rules.items()}


def _metadata(_arch: str, config: Config, d: Dims) -> Metadata:
    sliding = ["sliding" in kind.split() for kind in d.kinds]
    full_dim = d.more["full_dim"]
    found: Metadata = {
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
        **blocks.rms_norm(config),
    }
    if d.n_expert:
        found[Keys.LLM.EXPERT_COUNT] = d.n_expert
        found[Keys.LLM.EXPERT_USED_COUNT] = config.integer("top_k_experts")
        found[Keys.LLM.EXPERT_FEED_FORWARD_LENGTH] = d.n_ff_expert
    if config.has("final_logit_softcapping"):
        found[Keys.LLM.FINAL_LOGIT_SOFTCAPPING] = config.number("final_logit_softcapping")
    return found


def _frequencies(config: Config, d: Dims) -> Mapping[str, npt.NDArray[np.float32]]:
    """Full-attention layers rotate only the first pairs of a head; a huge divisor stops the
    others."""
    half = d.more["full_dim"] // 2
    share = config.rope().params.number("partial_rotary_factor", default=0.25)
    values = np.full(half, 1e30, dtype=np.float32)
    values[: int(d.more["full_dim"] * share / 2)] = 1
    return {"rope_freqs.weight": values}


def _check(config: Config, d: Dims) -> None:
    blocks.require(config, hidden_activation="gelu_pytorch_tanh", attention_bias=False)
    blocks.require(config, use_bidirectional_attention=(None, "vision"))
    for layers, kind in (("full_attention", "proportional"), ("sliding_attention", "default")):
        if (found := config.rope(layers).kind) != kind:
            raise ModelError(f"{config.name}: rope of {layers} is {found!r}, it must be {kind!r}")


GEMMA4 = Family(
    architecture="gemma4",
    names=("Gemma4ForCausalLM",),
    rules={
        **blocks.embeddings(),
        **gemma.norms(plus=0.0),
        f"{blocks.LAYER}.layer_scalar": Rule(
            "blk.{i}.layer_output_scale.weight", lambda d: (1,), optional=True
        ),
        **_attention(),
        **_feed_forward(),
        **_experts(),
        **per_layer_embeddings(),
    },
    metadata=_metadata,
    dims=_dims,
    extra_tensors=_frequencies,
    check=_check,
)


def text_part(family: Family, name: str) -> Family:
    """The text part of a multimodal checkpoint, without its vision and audio tensors."""
    return replace(
        family,
        names=(name,),
        section="text_config",
        roots=("model.", "model.language_model."),
        ignored=(r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",),
    )


FAMILIES = (GEMMA4, text_part(GEMMA4, "Gemma4ForConditionalGeneration"))
