"""Apertus: an xIELU activation without a gate, its parameters stored as tensors; normed heads."""

from __future__ import annotations

from gguf.constants import Keys

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata, Rule
from worker.convert.checkpoint import Checkpoint
from worker.convert.config import Config
from worker.convert.quantize import to_float32


def _apertus(config: Config, d: Dims) -> Metadata:
    return blocks.common_metadata("apertus", config, d) | blocks.rms_norm(config)


def _xielu(checkpoint: Checkpoint, d: Dims) -> Metadata:
    """The four parameters of the activation in each layer."""
    found: Metadata = {}
    for key, name in (
        (Keys.xIELU.ALPHA_N, "alpha_n"),
        (Keys.xIELU.ALPHA_P, "alpha_p"),
        (Keys.xIELU.BETA, "beta"),
        (Keys.xIELU.EPS, "eps"),
    ):
        sources = (f"model.layers.{i}.mlp.act_fn.{name}" for i in range(d.n_layers))
        values = [checkpoint.read(checkpoint.tensors[s]) for s in sources]
        found[key] = [float(to_float32(v).reshape(-1)[0]) for v in values]
    return found


def _check(config: Config, d: Dims) -> None:
    blocks.require(config, "hidden_act", "xielu")
    blocks.require(config, "attention_bias", False)
    blocks.require(config, "mlp_bias", False)


APERTUS = Family(
    architecture="apertus",
    names=("ApertusForCausalLM",),
    rules={
        **blocks.embeddings(),
        f"{blocks.LAYER}.attention_layernorm.weight": blocks.norm("blk.{i}.attn_norm"),
        f"{blocks.LAYER}.feedforward_layernorm.weight": blocks.norm("blk.{i}.ffn_norm"),
        **blocks.attention(biases=False),
        **blocks.head_norms(),
        f"{blocks.MLP}.up_proj.weight": Rule("blk.{i}.ffn_up.weight", lambda d: (d.n_ff, d.n_embd)),
        f"{blocks.MLP}.down_proj.weight": Rule(
            "blk.{i}.ffn_down.weight", lambda d: (d.n_embd, d.n_ff)
        ),
    },
    metadata=_apertus,
    tensor_metadata=_xielu,
    head="always",
    extra_tensors=blocks.llama3_factors,
    ignored=(r".*\.act_fn\.(alpha_n|alpha_p|beta|eps)",),
    check=_check,
)

FAMILIES = (APERTUS,)
