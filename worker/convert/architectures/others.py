"""Families with one member each: OLMo 2, StableLM and GPT-2."""

from __future__ import annotations

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule, Rules, Shape
from worker.convert.config import Config

_LAYER = "model.layers.{i}"


def _silu(config: Config, d: Dims) -> None:
    blocks.require(config, "hidden_act", "silu")


# --- OLMo 2: norms after attention and feed-forward, and across all heads of q and k ---------


def _olmo2(config: Config, d: Dims) -> Metadata:
    return blocks.common_metadata("olmo2", config, d) | blocks.rms_norm("olmo2", config)


OLMO2 = Family(
    architecture="olmo2",
    names=("Olmo2ForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.attention(biases=False),
        **blocks.gated_mlp(),
        f"{blocks.ATTENTION}.q_norm.weight": Rule(
            "blk.{i}.attn_q_norm.weight", lambda d: (d.q_rows,)
        ),
        f"{blocks.ATTENTION}.k_norm.weight": Rule(
            "blk.{i}.attn_k_norm.weight", lambda d: (d.kv_rows,)
        ),
        f"{_LAYER}.post_attention_layernorm.weight": blocks.norm("blk.{i}.post_attention_norm"),
        f"{_LAYER}.post_feedforward_layernorm.weight": blocks.norm("blk.{i}.post_ffw_norm"),
    },
    metadata=_olmo2,
    head="always",
    check=_silu,
)


# --- StableLM: layer norms with biases, partly turned heads ----------------------------------


def _stablelm(config: Config, d: Dims) -> Metadata:
    factor = config.rope().params.number(
        "partial_rotary_factor",
        default=config.number("partial_rotary_factor", "rope_pct", default=0.25),
    )
    return {
        **blocks.common_metadata("stablelm", config, d),
        "stablelm.rope.dimension_count": int(factor * d.head_dim),
        "stablelm.use_parallel_residual": config.flag("use_parallel_residual"),
        "stablelm.attention.layer_norm_epsilon": config.number(
            "layer_norm_eps", "norm_eps", default=1e-5
        ),
    }


def _per_head_norms() -> Rules:
    """StableLM 2 12B has a norm of its own for each head."""
    return {
        f"{blocks.ATTENTION}.q_layernorm.norms.{{e}}.weight": Rule(
            "blk.{i}.attn_q_norm.weight",
            lambda d: (d.n_head, d.head_dim),
            optional=True,
            stack=lambda d: d.n_head,
            keep_f32=True,
        ),
        f"{blocks.ATTENTION}.k_layernorm.norms.{{e}}.weight": Rule(
            "blk.{i}.attn_k_norm.weight",
            lambda d: (d.n_head_kv, d.head_dim),
            optional=True,
            stack=lambda d: d.n_head_kv,
            keep_f32=True,
        ),
    }


STABLELM = Family(
    architecture="stablelm",
    names=("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    rules={
        **blocks.embeddings(),
        "model.norm.bias": blocks.norm("output_norm", bias=True),
        f"{_LAYER}.input_layernorm.weight": blocks.norm("blk.{i}.attn_norm"),
        f"{_LAYER}.input_layernorm.bias": blocks.norm("blk.{i}.attn_norm", bias=True),
        # Absent where attention and feed-forward run side by side on one norm.
        f"{_LAYER}.post_attention_layernorm.weight": Rule(
            "blk.{i}.ffn_norm.weight", blocks.vector, optional=True
        ),
        f"{_LAYER}.post_attention_layernorm.bias": Rule(
            "blk.{i}.ffn_norm.bias", blocks.vector, optional=True
        ),
        **blocks.attention(),
        **_per_head_norms(),
        **blocks.gated_mlp(),
    },
    metadata=_stablelm,
    head="always",
    ignored=(r".*\.rotary_emb\.inv_freq",),
    check=_silu,
)


# --- GPT-2: learned positions, fused q/k/v, matrices stored as (inputs, outputs) --------------


def _gpt2_dims(config: Config) -> Dims:
    n_embd, n_head = config.integer("n_embd"), config.integer("n_head")
    return Dims(
        n_layers=config.integer("n_layer"),
        n_embd=n_embd,
        n_vocab=config.integer("vocab_size"),
        n_ff=config.integer("n_inner", default=4 * n_embd),
        n_head=n_head,
        n_head_kv=n_head,
        head_dim=n_embd // n_head,
        n_positions=config.integer("n_positions", "n_ctx"),
    )


def _gpt2(config: Config, d: Dims) -> Metadata:
    return {
        "gpt2.block_count": d.n_layers,
        "gpt2.context_length": d.n_positions,
        "gpt2.embedding_length": d.n_embd,
        "gpt2.feed_forward_length": d.n_ff,
        "gpt2.attention.head_count": d.n_head,
        "gpt2.attention.layer_norm_epsilon": config.number("layer_norm_epsilon", default=1e-5),
    }


def _check_gpt2(config: Config, d: Dims) -> None:
    blocks.require(config, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    blocks.require(config, "scale_attn_weights", True)
    blocks.require(config, "scale_attn_by_inverse_layer_idx", False)
    blocks.require(config, "add_cross_attention", False)


def _gpt2_rules() -> Rules:
    layer = "transformer.h.{i}"
    rules: dict[str, Rule] = {
        "transformer.wte.weight": Rule("token_embd.weight", lambda d: (d.n_vocab, d.n_embd)),
        "transformer.wpe.weight": Rule(
            "position_embd.weight", lambda d: (d.n_positions, d.n_embd), keep_f32=True
        ),
        "transformer.ln_f.weight": blocks.norm("output_norm"),
        "transformer.ln_f.bias": blocks.norm("output_norm", bias=True),
        "lm_head.weight": Rule("output.weight", lambda d: (d.n_vocab, d.n_embd), optional=True),
    }
    for source, target in (("ln_1", "attn_norm"), ("ln_2", "ffn_norm")):
        rules[f"{layer}.{source}.weight"] = blocks.norm(f"blk.{{i}}.{target}")
        rules[f"{layer}.{source}.bias"] = blocks.norm(f"blk.{{i}}.{target}", bias=True)
    linear: dict[str, tuple[str, Shape]] = {
        "attn.c_attn": ("attn_qkv", lambda d: (3 * d.n_embd, d.n_embd)),
        "attn.c_proj": ("attn_output", lambda d: (d.n_embd, d.n_embd)),
        "mlp.c_fc": ("ffn_up", lambda d: (d.n_ff, d.n_embd)),
        "mlp.c_proj": ("ffn_down", lambda d: (d.n_embd, d.n_ff)),
    }
    for source, (target, shape) in linear.items():
        rules[f"{layer}.{source}.weight"] = Rule(
            f"blk.{{i}}.{target}.weight", shape, transposed=True
        )
        rules[f"{layer}.{source}.bias"] = Rule(f"blk.{{i}}.{target}.bias", _rows_of(shape))
    return rules


def _rows_of(shape: Shape) -> Shape:
    return lambda d: shape(d)[:1]


GPT2 = Family(
    architecture="gpt2",
    names=("GPT2LMHeadModel",),
    rules=_gpt2_rules(),
    roots=("transformer.", ""),
    metadata=_gpt2,
    dims=_gpt2_dims,
    ignored=(r".*\.attn\.(masked_)?bias",),
    check=_check_gpt2,
)
