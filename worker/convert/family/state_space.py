"""What families with Mamba 2 mixers have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gguf.constants import Keys

from worker.convert.config import Config
from worker.convert.family.metadata import of_dims
from worker.convert.family.rules import Setting, Sources
from worker.convert.family.sizes import Dims

MAMBA2 = "ssm_in ssm_conv1d+ ssm_dt.bias =ssm_a =ssm_d ssm_out ssm_norm"
"""One mixer; published models have no biases of the projections."""


def sources(mixer: str) -> Sources:
    """What a mixer of this name has under other names than the `gguf` package expects."""
    return {"ssm_dt.bias": f"{mixer}.dt_bias"}


SOURCES: Sources = sources("mamba")

METADATA: Mapping[str, Setting] = {
    Keys.SSM.CONV_KERNEL: of_dims(lambda d: d.more["kernel"]),
    Keys.SSM.INNER_SIZE: of_dims(lambda d: d.more["inner"]),
    Keys.SSM.STATE_SIZE: of_dims(lambda d: d.more["state"]),
    Keys.SSM.TIME_STEP_RANK: of_dims(lambda d: d.more["heads"]),
    Keys.SSM.GROUP_COUNT: of_dims(lambda d: d.more["groups"]),
}


def with_sizes(d: Dims, config: Config, n_heads: int) -> Dims:
    """Add the sizes of a state space to `Dims.more`."""
    head_dim = config.integer("mamba_d_head", "mamba_head_dim", "head_dim")
    return replace(
        d,
        more={
            **d.more,
            "heads": n_heads,
            "inner": n_heads * head_dim,
            "state": config.integer("mamba_d_state", "ssm_state_size", "state_size"),
            "groups": config.integer("mamba_n_groups", "n_groups", default=1),
            "kernel": config.integer("mamba_d_conv", "conv_kernel", default=4),
        },
    )
