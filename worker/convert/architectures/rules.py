"""The words a family's table is written in: what becomes of each tensor of a checkpoint.

A table maps names as the checkpoint has them, with `{i}` for the layer and `{e}` for the member of
a stack (an expert, a head), to a `Rule`: the GGUF name and what is done to the rows on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.convert.config import Config

Value = bool | int | float | str | bytes | list[bool] | list[int] | list[float] | list[str]
Metadata = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Dims:
    """The sizes that shapes are made of."""

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

    @property
    def q_rows(self) -> int:
        return self.n_head * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.n_head_kv * self.head_dim

    @classmethod
    def of(cls, config: Config) -> Dims:
        """As most families spell them in `config.json`."""
        n_head = config.integer("num_attention_heads")
        n_embd = config.integer("hidden_size")
        return cls(
            n_layers=config.integer("num_hidden_layers"),
            n_embd=n_embd,
            n_vocab=config.integer("vocab_size"),
            n_ff=config.integer("intermediate_size"),
            n_head=n_head,
            n_head_kv=config.integer("num_key_value_heads", default=n_head),
            head_dim=config.integer("head_dim", default=n_embd // n_head),
        )


Shape = Callable[[Dims], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of tensor: its GGUF name, its shape there and how it is made."""

    target: str
    shape: Shape
    optional: bool = False
    """Absent in some checkpoints of the family: biases, an output head that is tied."""
    stack: Callable[[Dims], int] = field(default=lambda d: d.n_expert)
    """How many source tensors `{e}` stands for; they become one, in order."""
    interleaved_heads: Callable[[Dims], int] | None = None
    """The number of rotary heads, where rows hold the two halves of each one after the other and
    llama.cpp wants them interleaved."""
    plus: float = 0.0
    """Added to every value: Gemma stores its norm weights less one."""
    transposed: bool = False
    """Stored as (inputs, outputs)."""
    rows: Callable[[Dims], tuple[int, int]] | None = None
    """(first row, number of rows) of a fused tensor, per expert where there are several."""
    keep_f32: bool = False
    """Stored as F32 in every output type."""


Rules = Mapping[str, "Rule | tuple[Rule, ...]"]
"""A source tensor that is split has several rules."""


@dataclass(frozen=True, slots=True)
class Family:
    """Everything the converter knows about one family of models."""

    architecture: str
    """`general.architecture`, the name of llama.cpp's implementation."""
    names: tuple[str, ...]
    """`architectures` in `config.json`."""
    rules: Rules
    metadata: Callable[[Config, Dims], Metadata]
    dims: Callable[[Config], Dims] = Dims.of
    roots: tuple[str, ...] = ("model.",)
    """How names begin: first as in `rules`, then as other checkpoints of the family have it."""
    section: str = ""
    """Of `config.json`, that describes the text model; the whole file by default."""
    head: Literal["optional", "always", "never"] = "optional"
    """Whether llama.cpp's implementation reads an output head of its own, which a checkpoint may
    tie to the embedding."""
    ignores_window: bool = False
    """llama.cpp attends to everything where the configuration asks for a sliding window."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensors that some checkpoints carry and the model does not need."""
    extra_tensors: Callable[[Config, Dims], Mapping[str, Any]] = field(
        default=lambda config, dims: {}
    )
    """Small F32 tensors that come from the configuration alone."""
    check: Callable[[Config, Dims], None] = field(default=lambda config, dims: None)
    """Refuses settings of the family that llama.cpp does not implement."""
