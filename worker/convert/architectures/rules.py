"""The rules of a family's table: what each tensor of a checkpoint becomes.

A table maps tensor names of the checkpoint to a `Rule`, which gives the GGUF name and the changes
of the rows. In a name, `{i}` stands for the layer and `{e}` for the member of a stack (an expert, a
head): the output's first axis, in order.
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
"""Values by key as `gguf` has it: `{arch}` stands for the architecture, which `output.header` fills
in."""


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
    """The kind of each layer in families whose layers differ: words that `Rule.on` refers to."""
    more: Mapping[str, int] = field(default_factory=dict)
    """Sizes that only this family has."""
    scales: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Constants, particular to this family, that weights are multiplied with."""

    @property
    def q_rows(self) -> int:
        return self.n_head * self.head_dim

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


Array = npt.NDArray[Any]
Shape = Callable[[Dims], tuple[int, ...]]
Make = Callable[[Sequence[Array], Dims], Array]
"""Computes the values to write, in a stored type or as float32, from source tensors as they are
stored (BF16 as `uint16`)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What one kind of tensor becomes: its GGUF name, its shape and how it is made."""

    target: str
    shape: Shape
    optional: bool = False
    """Some checkpoints of the family lack it: a bias, or an output head that is tied."""
    interleaved: bool = False
    """The rows of each rotary head hold one half after the other, and llama.cpp needs the halves
    interleaved."""
    plus: float = 0.0
    """This is added to every value: Gemma stores its norm weights less one."""
    rows: Callable[[Dims], tuple[int, int]] | None = None
    """First row and number of rows in a fused tensor, or in each expert of a stack."""
    make: Make | None = None
    """Computes the tensor, or one member of a stack, from whole source tensors."""
    also: tuple[str, ...] = ()
    """Further source tensors that `make` is given."""
    per_expert: bool = False
    """`make` gets one expert of each source, which is a stack, at a time."""
    kind: str = ""
    """The ggml type of the bytes that `make` returns, whatever the output type; its source tensors
    may then have any type."""
    on: str = ""
    """Only layers of this kind have the tensor (see `Dims.kinds`)."""
    keep_f32: bool = False
    """The tensor is F32 in every output type."""
    pads_rows: bool = False
    """Rows that the source lacks at its end become zeros."""


def transposed(sources: Sequence[Array], _d: Dims) -> Array:
    """Transpose a weight that is stored as (inputs, outputs)."""
    return np.ascontiguousarray(sources[0].swapaxes(-1, -2))


Rules = Mapping[str, "Rule | tuple[Rule, ...]"]
"""A source tensor that is split has several rules."""


@dataclass(frozen=True, slots=True)
class Family:
    """Everything that the converter knows about one family of models."""

    architecture: str
    """`general.architecture`: the name of llama.cpp's implementation."""
    names: tuple[str, ...]
    """The values of `architectures` in `config.json` that mean this family."""
    rules: Rules
    metadata: Callable[[str, Config, Dims], Metadata]
    """Gets the architecture, too."""
    dims: Callable[[Config], Dims] = Dims.of
    roots: tuple[str, ...] = ("model.",)
    """Prefixes of tensor names: first the one in `rules`, then those of other checkpoints."""
    section: str = ""
    """The key in `config.json` of the text model's section; empty for the whole file."""
    head: Literal["optional", "always", "never", "none"] = "optional"
    """Whether llama.cpp reads a separate output head in this family. A checkpoint may tie its head
    to the embedding; encoders have none."""
    applies: Callable[[Config], bool] = field(default=lambda config: True)
    """Distinguishes families that have the same name in `config.json`."""
    ignores_window: bool = False
    """llama.cpp ignores the sliding window of this family and attends to the whole context."""
    ignores_extra_layers: bool = False
    """Layers after the last one predict further tokens and are left out."""
    ignored: tuple[str, ...] = ()
    """Regular expressions for tensors that are left out: the model does not need them."""
    extra_tensors: Callable[[Config, Dims], Mapping[str, Any]] = field(
        default=lambda config, dims: {}
    )
    """Small tensors computed from the configuration; a checkpoint's own ones replace them."""
    tensor_metadata: Callable[[Checkpoint, Dims], Metadata] = field(
        default=lambda checkpoint, dims: {}
    )
    """Metadata that the checkpoint stores as small tensors."""
    notes: Callable[[Config], Iterable[str]] = field(default=lambda config: ())
    """Known differences between llama.cpp's implementation and the source's framework."""
    check: Callable[[Config, Dims], None] = field(default=lambda config, dims: None)
    """Refuses settings of the family that llama.cpp does not implement."""
