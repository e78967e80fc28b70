"""The sizes of a model, sums and products of them, and the shapes of tensors that follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from worker.convert.config import Config


@dataclass(frozen=True, slots=True)
class Dims:
    """The sizes from which tensor shapes are computed."""

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
    scales: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Constants, particular to this family, that weights are multiplied with."""

    @property
    def kv_rows(self) -> int:
        return self.n_head_kv * self.head_dim

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


@dataclass(frozen=True, slots=True)
class Size:
    """A size that is computed from a model's `Dims`; arithmetic on sizes gives sizes."""

    of: Callable[[Dims], int]

    def __add__(self, other: Size) -> Size:
        return Size(lambda d: self.of(d) + other.of(d))

    def __mul__(self, other: Size) -> Size:
        return Size(lambda d: self.of(d) * other.of(d))

    def __rmul__(self, factor: int) -> Size:
        return Size(lambda d: factor * self.of(d))

    def __floordiv__(self, other: Size) -> Size:
        return Size(lambda d: self.of(d) // other.of(d))


def size(name: str) -> Size:
    """The size that the family itself has in `Dims.more`."""
    return Size(lambda d: d.more[name])


def fixed(number: int) -> Size:
    return Size(lambda _: number)


Shape = tuple[Size, ...]
"""Of a tensor; row-major, so inputs come last."""


def extents(shape: Shape, d: Dims) -> tuple[int, ...]:
    return tuple(each.of(d) for each in shape)


ONE = fixed(1)
LAYERS = Size(lambda d: d.n_layers)
EMBD = Size(lambda d: d.n_embd)
VOCAB = Size(lambda d: d.n_vocab)
POSITIONS = Size(lambda d: d.n_positions)
HEADS = Size(lambda d: d.n_head)
KV_HEADS = Size(lambda d: d.n_head_kv)
HEAD = Size(lambda d: d.head_dim)
Q = HEADS * HEAD
KV = KV_HEADS * HEAD
FF = Size(lambda d: d.n_ff)
EXPERTS = Size(lambda d: d.n_expert)
FF_EXPERT = Size(lambda d: d.n_ff_expert)
FF_SHARED = Size(lambda d: d.n_ff_shared)
SSM_HEADS = size("heads")
SSM_INNER = size("inner")
SSM_GROUPS = size("groups")
SSM_KERNEL = size("kernel")
SSM_CHANNELS = SSM_INNER + 2 * (SSM_GROUPS * size("state"))

SHAPES: Mapping[str, Shape] = {
    "token_embd": (VOCAB, EMBD),
    "output": (VOCAB, EMBD),
    "position_embd": (POSITIONS, EMBD),
    "token_types": (size("n_types"), EMBD),
    "attn_q": (Q, EMBD),
    "attn_k": (KV, EMBD),
    "attn_v": (KV, EMBD),
    "attn_qkv": (Q + 2 * KV, EMBD),
    "attn_output": (EMBD, Q),
    "attn_q_norm": (HEAD,),
    "attn_k_norm": (HEAD,),
    "attn_sinks": (HEADS,),
    "ffn_gate": (FF, EMBD),
    "ffn_up": (FF, EMBD),
    "ffn_down": (EMBD, FF),
    "ffn_gate_inp": (EXPERTS, EMBD),
    "ffn_gate_inp_shexp": (ONE, EMBD),
    "exp_probs_b": (EXPERTS,),
    "ffn_gate_exps": (EXPERTS, FF_EXPERT, EMBD),
    "ffn_up_exps": (EXPERTS, FF_EXPERT, EMBD),
    "ffn_down_exps": (EXPERTS, EMBD, FF_EXPERT),
    "ffn_gate_up_exps": (EXPERTS, 2 * FF_EXPERT, EMBD),
    "ffn_gate_shexp": (FF_SHARED, EMBD),
    "ffn_up_shexp": (FF_SHARED, EMBD),
    "ffn_down_shexp": (EMBD, FF_SHARED),
    "ssm_in": (SSM_INNER + SSM_CHANNELS + SSM_HEADS, EMBD),
    "ssm_conv1d": (SSM_CHANNELS, SSM_KERNEL),
    "ssm_dt": (SSM_HEADS,),
    "ssm_a": (SSM_HEADS, ONE),
    "ssm_d": (SSM_HEADS, ONE),
    "ssm_norm": (SSM_GROUPS, SSM_INNER // SSM_GROUPS),
    "ssm_out": (EMBD, SSM_INNER),
}
"""By the GGUF's names without layer and suffix; of weights. Norms that are not here are vectors of
`n_embd` values, and a bias has as many as its weight has rows."""


def shape_of(word: str, suffix: str, own: Mapping[str, Shape]) -> Shape:
    """The shape of a tensor; `own` has those that a family has otherwise."""
    for shapes in (own, SHAPES):
        if f"{word}.{suffix}" in shapes:
            return shapes[f"{word}.{suffix}"]
        if word in shapes:
            return shapes[word] if suffix == "weight" else shapes[word][:1]
    assert is_norm(word), f"no shape of {word}"
    return (EMBD,)


def is_norm(word: str) -> bool:
    return word.rstrip("_12").endswith("norm")
