"""Apertus: an xIELU activation without a gate, its parameters stored as tensors; normed heads."""

from __future__ import annotations

from gguf.constants import Keys

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Family, Metadata
from worker.convert.checkpoint import Checkpoint
from worker.convert.quantize import to_float32


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


APERTUS = Family(
    architecture="apertus",
    names=("ApertusForCausalLM",),
    rules={
        **blocks.embeddings(),
        **blocks.norms(attention_layernorm="attn_norm", feedforward_layernorm="ffn_norm"),
        **blocks.attention(biases=False),
        **blocks.head_norms(),
        **blocks.mlp(),
    },
    metadata=blocks.rms_metadata,
    tensor_metadata=_xielu,
    head="always",
    extra_tensors=blocks.llama3_factors,
    ignored=(r".*\.act_fn\.(alpha_n|alpha_p|beta|eps)",),
    check=blocks.requires(hidden_act="xielu", attention_bias=False, mlp_bias=False),
)

FAMILIES = (APERTUS,)
