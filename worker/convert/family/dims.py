"""The sizes of a model that a description goes by, and the words for the tensors that most have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from worker.convert.config import Config

QKV = "attn_q~ attn_k~ attn_v~"
ATTENTION = f"{QKV} attn_output~"
GATED = "ffn_gate ffn_up ffn_down"
EXPERTS = "ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps"
SHARED = "ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
HEAD_NORMS = "attn_q_norm attn_k_norm"


@dataclass(frozen=True, slots=True)
class Dims:
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_expert: int = 0
    n_ff_expert: int = 0
    n_ff_shared: int = 0
    n_positions: int = 0
    kinds: tuple[str, ...] = ()
    """The kind of each layer in families whose layers differ: words that `Family.layers` has."""
    more: Mapping[str, int] = field(default_factory=dict)
    """Sizes that only this family has."""

    @classmethod
    def of(cls, config: Config) -> Dims:
        """The sizes from the keys that most families use in `config.json`."""
        n_head = config.integer("num_attention_heads")
        n_embd = config.integer("hidden_size")
        return cls(
            n_layers=config.integer("num_hidden_layers"),
            n_embd=n_embd,
            n_vocab=config.integer("vocab_size"),
            n_ff=config.integer("intermediate_size", "moe_intermediate_size"),
            n_head=n_head,
            n_head_kv=config.integer("num_key_value_heads", default=n_head),
            head_dim=config.integer("head_dim", default=n_embd // n_head),
        )


def named(config: Config, keys: Mapping[str, str], **fixed: object) -> Dims:
    """The sizes of a family whose settings have other names, its own by the usual ones; `fixed`
    has values that follow from others."""
    return Dims.of(Config({**renamed(config, keys).values, **fixed}, config.name))


def renamed(config: Config, keys: Mapping[str, str], **defaults: object) -> Config:
    """With the usual names, of which those that are there already are kept."""
    present = {key: value for key, value in config.values.items() if value is not None}
    own = {usual: present[key] for usual, key in keys.items() if key in present}
    return Config({**defaults, **own, **present}, config.name)


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

    Shared experts have a width of their own, or there are `n_shared` as wide as the others. The
    first layers are dense: `n_dense` of them, or those that `mlp_layer_types` says.
    """

    def dims(config: Config) -> Dims:
        d, n_ff = Dims.of(config), config.integer(width)
        shared = config.integer(shared_width) if shared_width else 0
        if n_shared:
            shared = n_ff * config.integer(n_shared)
        d = replace(d, n_expert=config.integer(*n_expert), n_ff_expert=n_ff, n_ff_shared=shared)
        if n_dense:
            kinds = config.values.get("mlp_layer_types")
            said = kinds.count("dense") if isinstance(kinds, list) else 0
            first = int(config.number(n_dense, default=said))
            d = replace(d, kinds=leading_dense(d.n_layers, first))
        return d

    return dims
