"""GPT-2: learned positions, and weights stored as (inputs, outputs)."""

from __future__ import annotations

from worker.convert.architectures import blocks, shapes
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

_LAYER = "transformer.h.{i}"


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


def _gpt2(_arch: str, config: Config, d: Dims) -> Metadata:
    return {
        **blocks.sizes(d, d.n_positions),
        **blocks.layer_norm_epsilon(config, "layer_norm_epsilon"),
    }


def _linear(source: str, target: str, shape: Shape) -> Rules:
    return blocks.linear(f"{_LAYER}.{source}", f"blk.{{i}}.{target}", shape, make=transposed)


GPT2 = Family(
    architecture="gpt2",
    names=("GPT2LMHeadModel",),
    rules={
        "transformer.wte.weight": Rule("token_embd.weight", shapes.by_token),
        "transformer.wpe.weight": Rule(
            "position_embd.weight", lambda d: (d.n_positions, d.n_embd), keep_f32=True
        ),
        **blocks.layer_norm("transformer.ln_f", "output_norm"),
        "lm_head.weight": Rule("output.weight", shapes.by_token, optional=True),
        **blocks.layer_norm(f"{_LAYER}.ln_1", "blk.{i}.attn_norm"),
        **blocks.layer_norm(f"{_LAYER}.ln_2", "blk.{i}.ffn_norm"),
        **_linear("attn.c_attn", "attn_qkv", shapes.three_squares),
        **_linear("attn.c_proj", "attn_output", shapes.square),
        **_linear("mlp.c_fc", "ffn_up", shapes.up),
        **_linear("mlp.c_proj", "ffn_down", shapes.down),
    },
    roots=("transformer.", ""),
    metadata=_gpt2,
    dims=_gpt2_dims,
    ignored=(r".*\.attn\.(masked_)?bias",),
    check=blocks.requires(
        activation_function=("gelu_new", "gelu_pytorch_tanh"),
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    ),
)

FAMILIES = (GPT2,)
