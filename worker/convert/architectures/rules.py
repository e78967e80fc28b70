"""What a family's table is made of: rules that say what becomes of each tensor of a checkpoint.

A table maps names as the checkpoint has them, with `{i}` for the layer and `{e}` for the member of
a stack (an expert, a head), to a `Rule`: the GGUF name and what is done to the rows on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from worker.convert.checkpoint import Checkpoint
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
    kinds: tuple[str, ...] = ()
    """What each layer is, where layers differ: words that `Rule.on` names."""
    more: Mapping[str, int] = field(default_factory=dict)
    """Sizes that one family alone has, by names of its own."""
    scales: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Constants that weights are multiplied with, likewise."""

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
            n_ff=config.integer("intermediate_size", "moe_intermediate_size"),
            n_head=n_head,
            n_head_kv=config.integer("num_key_value_heads", default=n_head),
            head_dim=config.integer("head_dim", default=n_embd // n_head),
        )


Array = npt.NDArray[Any]
Shape = Callable[[Dims], tuple[int, ...]]
Make = Callable[[Sequence[Array], Dims], Array]
"""Source tensors as they are stored (BF16 as `uint16`) to the values to write, as they are stored
or as float32."""


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
    rows: Callable[[Dims], tuple[int, int]] | None = None
    """(first row, number of rows) of a fused tensor, per expert where there are several."""
    make: Make | None = None
    """Computes the tensor, or one member of a stack, from whole source tensors."""
    also: tuple[str, ...] = ()
    """Further source tensors that `make` is given."""
    slices: Callable[[Dims], int] | None = None
    """`make` is given one of so many parts of each source at a time: an expert of a stack."""
    kind: str = ""
    """The ggml type whose bytes `make` returns, whatever the output type; source tensors may be of
    any type then."""
    on: str = ""
    """Only layers of this kind have it, see `Dims.kinds`."""
    keep_f32: bool = False
    """Stored as F32 in every output type."""
    pads_rows: bool = False
    """Rows that the source lacks at its end are zeros."""


def transposed(sources: Sequence[Array], _d: Dims) -> Array:
    """For weights that are stored as (inputs, outputs)."""
    return np.ascontiguousarray(sources[0].swapaxes(-1, -2))


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
    head: Literal["optional", "always", "never", "none"] = "optional"
    """Whether llama.cpp's implementation reads an output head of its own, which a checkpoint may
    tie to the embedding; encoders have none."""
    applies: Callable[[Config], bool] = field(default=lambda config: True)
    """Tells families apart that share a name in `config.json`."""
    ignores_window: bool = False
    """llama.cpp attends to everything where the configuration asks for a sliding window."""
    ignores_extra_layers: bool = False
    """Layers behind the last one predict further tokens ahead, and are left out."""
    ignored: tuple[str, ...] = ()
    """Regular expressions of tensors that some checkpoints carry and the model does not need."""
    extra_tensors: Callable[[Config, Dims], Mapping[str, Any]] = field(
        default=lambda config, dims: {}
    )
    """Small tensors that come from the configuration alone; a checkpoint's own ones win."""
    tensor_metadata: Callable[[Checkpoint, Dims], Metadata] = field(
        default=lambda checkpoint, dims: {}
    )
    """Metadata that the checkpoint stores as tensors, by small numbers."""
    notes: Callable[[Config], Iterable[str]] = field(default=lambda config: ())
    """Where llama.cpp's implementation is known to differ from the source's framework."""
    check: Callable[[Config, Dims], None] = field(default=lambda config, dims: None)
    """Refuses settings of the family that llama.cpp does not implement."""
