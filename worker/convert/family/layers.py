"""The sizes of families with experts, and the kinds of their layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from worker.convert.config import Config
from worker.convert.family.sizes import Dims

QKV = "attn_q~ attn_k~ attn_v~"
ATTENTION = f"{QKV} attn_output~"
GATED = "ffn_gate ffn_up ffn_down"
EXPERTS = "ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps"
SHARED = "ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
HEAD_NORMS = "attn_q_norm attn_k_norm"


def leading_dense(n_layers: int, n_dense: int) -> tuple[str, ...]:
    """The kinds of the layers: the first `n_dense` have no experts."""
    n_dense = min(n_dense, n_layers)
    return ("dense",) * n_dense + ("experts",) * (n_layers - n_dense)


def with_experts(
    *n_expert: str,
    width: str = "moe_intermediate_size",
    shared_width: str = "",
    n_shared: str = "",
    n_dense: str = "",
) -> Callable[[Config], Dims]:
    """The sizes of a family with experts, whose settings have these names.

    Shared experts have a width of their own, or there are `n_shared` as wide as the others.
    """

    def dims(config: Config) -> Dims:
        d, n_ff = Dims.of(config), config.integer(width)
        shared = config.integer(shared_width) if shared_width else 0
        if n_shared:
            shared = n_ff * config.integer(n_shared)
        d = replace(d, n_expert=config.integer(*n_expert), n_ff_expert=n_ff, n_ff_shared=shared)
        if n_dense:
            kinds = leading_dense(d.n_layers, int(config.number(n_dense, default=0)))
            d = replace(d, kinds=kinds)
        return d

    return dims
