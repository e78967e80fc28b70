"""Apertus: an xIELU activation without a gate, its parameters stored as tensors; normed heads."""

from __future__ import annotations

from gguf.constants import Keys

from worker.convert.checkpoint import Checkpoint
from worker.convert.family.layers import HEAD_NORMS
from worker.convert.family.metadata import llama3_factors
from worker.convert.family.rules import Family, Metadata
from worker.convert.family.sizes import Dims
from worker.convert.quantize import to_float32

_PARAMETERS = {
    Keys.xIELU.ALPHA_N: "alpha_n",
    Keys.xIELU.ALPHA_P: "alpha_p",
    Keys.xIELU.BETA: "beta",
    Keys.xIELU.EPS: "eps",
}


def _xielu(checkpoint: Checkpoint, d: Dims) -> Metadata:
    """The four parameters of the activation in each layer."""
    found: Metadata = {}
    for key, name in _PARAMETERS.items():
        sources = (f"model.layers.{i}.mlp.act_fn.{name}" for i in range(d.n_layers))
        values = [checkpoint.read(checkpoint.tensors[s]) for s in sources]
        found[key] = [float(to_float32(v).reshape(-1)[0]) for v in values]
    return found


APERTUS = Family(
    "apertus",
    ("ApertusForCausalLM",),
    f"attn_norm attn_q attn_k attn_v attn_output {HEAD_NORMS} ffn_norm ffn_up ffn_down",
    tensor_metadata=_xielu,
    head="always",
    scales_as_llama3=True,
    extra_tensors=llama3_factors,
    ignored=(r".*\.act_fn\.(alpha_n|alpha_p|beta|eps)",),
    requires={"hidden_act": "xielu", "attention_bias": False, "mlp_bias": False},
)
