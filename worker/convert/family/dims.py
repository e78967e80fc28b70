"""The sizes of a model, read from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from worker.convert.config import Config


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
    kinds: tuple[str, ...] = ()
    """The kind of each layer, in words that the family chooses; empty if all layers are alike."""
    extra: Mapping[str, int] = field(default_factory=dict)
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


def with_experts(
    n_expert: str,
    width: str = "moe_intermediate_size",
    shared_width: str = "",
    n_shared: str = "",
    n_dense: str = "",
    optional: bool = False,
    of: Callable[[Config], Dims] = Dims.of,
) -> Callable[[Config], Dims]:
    """Returns a function that reads the sizes of a family with experts from settings of these
    names; `of` reads the other sizes.

    Shared experts have a width of their own, or there are `n_shared` as wide as the others. With
    `n_dense`, the first layers are dense: as many as `mlp_layer_types` says, or `n_dense`. With
    `optional`, models of the family may have no experts.
    """

    def dims(config: Config) -> Dims:
        d, n_ff = of(config), config.integer(width)
        shared = n_ff * config.integer(n_shared) if n_shared else config.count(shared_width)
        n = config.count(n_expert) if optional else config.integer(n_expert)
        d = replace(d, n_expert=n, n_ff_expert=n_ff, n_ff_shared=shared)
        if n_dense:
            if config.has("mlp_layer_types"):
                first = config.items("mlp_layer_types").count("dense")
            else:
                first = config.count(n_dense)
            layers = enumerate(d.kinds or ("",) * d.n_layers)
            kinds = (f"{kind} {'dense' if i < first else 'experts'}" for i, kind in layers)
            d = replace(d, kinds=tuple(kind.strip() for kind in kinds))
        return d

    return dims
