"""GPT-2: learned positions, and weights stored as (inputs, outputs)."""

from __future__ import annotations

from worker.convert.config import Config
from worker.convert.family.metadata import layer_norm, sizes
from worker.convert.family.rules import Family, Metadata, transposed
from worker.convert.family.sizes import Dims


def _dims(config: Config) -> Dims:
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


def _metadata(_family: Family, config: Config, d: Dims) -> Metadata:
    return sizes(d, d.n_positions) | layer_norm(config, "layer_norm_epsilon")


GPT2 = Family(
    "gpt2",
    ("GPT2LMHeadModel",),
    "attn_norm+ ffn_norm+ attn_qkv+ attn_output+ ffn_up+ ffn_down+",
    model="token_embd position_embd output_norm+ output?",
    layer="transformer.h.{i}",
    roots=("transformer.", ""),
    sources={
        "attn_norm": "ln_1",
        "ffn_norm": "ln_2",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
        "token_embd": "transformer.wte",
        "output_norm": "transformer.ln_f",
    },
    makes=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), transposed),
    common=_metadata,
    dims=_dims,
    ignored=(r".*\.attn\.(masked_)?bias",),
    requires={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
)
