"""SmolLM3: Llama's blocks, without a rotation in every fourth layer."""

from __future__ import annotations

from worker.convert.config import Config
from worker.convert.family.layers import ATTENTION, GATED
from worker.convert.family.rules import Family
from worker.convert.family.sizes import Dims
from worker.errors import ModelError


def _check(config: Config, d: Dims) -> None:
    # llama.cpp skips the rotation in every fourth layer and has no setting for it.
    pattern = [int((i + 1) % 4 != 0) for i in range(d.n_layers)]
    if (config.values.get("no_rope_layers") or pattern) != pattern:
        raise ModelError(
            f"{config.name}: no_rope_layers must leave out every fourth layer, "
            "llama.cpp's smollm3 knows no other pattern"
        )


SMOLLM3 = Family(
    "smollm3",
    ("SmolLM3ForCausalLM",),
    f"attn_norm {ATTENTION} ffn_norm {GATED}",
    interleaved=True,
    requires={"hidden_act": "silu", "use_sliding_window": False},
    check=_check,
)
