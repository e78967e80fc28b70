"""GPT-2: learned positions, and weights stored as (inputs, outputs)."""

from __future__ import annotations

from gguf.constants import Keys

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import (
    Dims,
    Family,
    Metadata,
    Rule,
    Rules,
    Shape,
    transposed,
)
from worker.convert.config import Config


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
        Keys.LLM.BLOCK_COUNT: d.n_layers,
        Keys.LLM.CONTEXT_LENGTH: d.n_positions,
        Keys.LLM.EMBEDDING_LENGTH: d.n_embd,
        Keys.LLM.FEED_FORWARD_LENGTH: d.n_ff,
        Keys.Attention.HEAD_COUNT: d.n_head,
        Keys.Attention.LAYERNORM_EPS: config.number("layer_norm_epsilon", default=1e-5),
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
            f"blk.{{i}}.{target}.weight", shape, make=transposed
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

FAMILIES = (GPT2,)
