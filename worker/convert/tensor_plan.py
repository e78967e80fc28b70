"""Plans the output: each GGUF tensor as row ranges of source tensors.

The plan follows from the checkpoint's headers and the family's description. Surplus and misshapen
tensors, and layers that lack a tensor which others have, are refused before the first byte is
written. If all layers lack one, `Family.needs` or llama.cpp (`tokenizer.check`) reports it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from worker.convert.checkpoint import READABLE, Checkpoint
from worker.convert.config import Config
from worker.convert.family.dims import Dims
from worker.convert.family.metadata import llama3_factors
from worker.convert.family.rules import Family, Into, Place
from worker.convert.quantize import size_bytes
from worker.convert.safetensors import TensorInfo
from worker.errors import ModelError

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
_COMPARED_VALUES = 1 << 22
"""Number of values of an output head that are compared with the embedding at once."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Consecutive rows of an output tensor: a row range of one source, or what `make` computes
    from its sources. A tensor computed from the configuration alone has no sources."""

    sources: tuple[TensorInfo, ...]
    n_rows: int
    first_row: int = 0
    head_rows: int = 0
    """Rows per rotary head, whose two halves are interleaved; 0 keeps the order."""
    make: Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]] | None = None
    """Computes all rows at once from the whole sources, or from one member of each."""
    part: int = 0
    n_parts: int = 0
    """`make` gets member `part` of the `n_parts` along each source's first axis; 0: all of it."""

    def read(self, checkpoint: Checkpoint, first: int, count: int) -> npt.NDArray[Any]:
        """`count` rows of this piece from `first` on, in output order, as stored or as float32."""
        if self.make is not None:
            made = self.make([checkpoint.read(s, self.part, self.n_parts) for s in self.sources])
            return made.reshape(self.n_rows, -1)[first : first + count]
        rows = checkpoint.read_rows(self.sources[0], self.first_row + first, count)
        return interleaved(rows, self.head_rows) if self.head_rows else rows


def interleaved(rows: npt.NDArray[Any], head_rows: int) -> npt.NDArray[Any]:
    """Interleave the two halves of each rotary head of `head_rows` rows."""
    halves = rows.reshape(-1, 2, head_rows // 2, rows.shape[-1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the GGUF; `shape` in row-major order."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[RowSpan, ...]
    plus: float = 0.0
    keep_f32: bool = False
    kind: str = ""
    """The ggml type to write; empty in a plan if the output type decides."""
    offset: int = 0
    """Position of its first byte, in a file whose layout is known."""

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.kind, self.n_elements)

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row_length(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1


def plan_tensors(
    checkpoint: Checkpoint, family: Family, config: Config, d: Dims
) -> list[OutputTensor]:
    """Plan every tensor of the output, in the order of writing.

    Raises:
        ModelError: a layer lacks a tensor that others of its kind have, or all lack one that the
            configuration requires; or a tensor is unknown, ruled out or of a wrong shape.
    """
    if d.kinds and len(d.kinds) != d.n_layers:
        raise ModelError(f"{config.name} has {d.n_layers} layers, but the kinds of {len(d.kinds)}")
    outputs: dict[str, OutputTensor] = {}
    extra = {**llama3_factors(config, d), **family.extra_tensors(config, d)}
    for name, values in extra.items():
        piece = RowSpan((), len(values), make=partial(_constant, values))
        outputs[name] = OutputTensor(name, values.shape, (piece,))
    made_shape = cache(partial(_made_shape, d))
    instances = list(_instances(checkpoint, family, d))
    idle = {each.name for each in instances if each.uses_only(checkpoint.idle)}
    present = {within_layer(name) for name in {*outputs, *(each.name for each in instances)} - idle}
    present.update(set(family.lacking(config, present)).intersection(map(within_layer, idle)))
    for instance in (each for each in instances if within_layer(each.name) in present):
        members = [instance.members[i] for i in sorted(instance.members)]
        if (last := max(instance.members)) >= len(members):
            raise ModelError(f"{instance.name} lacks some of its members up to number {last}")
        _check_readable(checkpoint, instance, members)
        outputs[instance.name] = _output(instance, members, d, made_shape)
    for name in family.lacking(config, present):
        raise ModelError(
            f"{checkpoint.folder} lacks the source of {name}, which a model of the "
            f"{family.architecture} family with this {config.name} has",
            tensor=name,
        )
    for name in family.denied(config, present):
        raise ModelError(
            f"{checkpoint.folder} has a source of {name}, which a model with this {config.name} "
            "does not have: its own class ignores it, and llama.cpp would use it",
            tensor=name,
        )
    if family.head != "none":
        _tie_head(checkpoint, family, outputs, config)
    return sorted(outputs.values(), key=_position)


def within_layer(name: str) -> str:
    """The GGUF name of a tensor without its layer's prefix."""
    return re.sub(r"^blk\.\d+\.", "", name)


def _constant(values: npt.NDArray[Any], _sources: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return values


@dataclass(frozen=True, slots=True)
class Instance:
    """A rule applied to one layer."""

    rule: Into
    name: str
    """In the GGUF."""
    members: dict[int, tuple[TensorInfo, ...]] = field(default_factory=dict)
    """The source and those of `Into.also`, by member of a stack; by -1 if it is not a stack."""

    def uses_only(self, names: Set[str]) -> bool:
        return all(info.name in names for member in self.members.values() for info in member)


def _instances(checkpoint: Checkpoint, family: Family, d: Dims) -> Iterable[Instance]:
    found: dict[str, Instance] = {}
    layers: list[dict[str, str]] = [{} for _ in range(d.n_layers)]
    becomes, names = cache(family.becomes), checkpoint.tensors
    for name, info in names.items():
        if family.why_left_out(name, d) is not None:
            continue
        at = Place.of(name)
        rules = becomes(at.form)
        if rules is None and name in checkpoint.idle:
            continue
        if rules is None or at.layer >= d.n_layers:
            raise ModelError(
                f"tensor {name} in {info.path.name} is not known to the {family.architecture} "
                "family with the sizes in config.json",
                tensor=name,
            )
        if at.layer >= 0:
            layers[at.layer][f"{at.form} {at.member}"] = name
        for rule in rules:
            target = rule.target.replace("{i}", str(at.layer))
            instance = found.setdefault(target, Instance(rule, target))
            taken = instance.members
            if at.member in taken or taken and (at.member < 0 or -1 in taken):
                other = next(iter(taken.values()))[0].name
                raise ModelError(f"tensors {other} and {name} both become {target}", tensor=target)
            before = re.findall(r".*\.\d+\.|", name)[0]
            beside = [before + also for also in rule.also]
            if lacking := next((other for other in beside if other not in names), None):
                raise _lacks(checkpoint, lacking)
            taken[at.member] = (info, *(names[other] for other in beside))
    _check_complete(checkpoint, layers, d)
    return found.values()


def _check_complete(checkpoint: Checkpoint, layers: Sequence[Mapping[str, str]], d: Dims) -> None:
    """Check that every layer has the tensors that others of its kind have."""
    kinds = d.kinds or ("",) * d.n_layers
    wanted: dict[str, dict[str, str]] = {}
    for kind, layer in zip(kinds, layers, strict=True):
        stated = {form: name for form, name in layer.items() if name not in checkpoint.idle}
        wanted.setdefault(kind, {}).update(stated)
    for i, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        for form, name in wanted[kind].items():
            if form not in layer:
                raise _lacks(checkpoint, re.sub(r"\.\d+\.", f".{i}.", name, count=1))


def _lacks(checkpoint: Checkpoint, name: str) -> ModelError:
    return ModelError(f"{checkpoint.folder} lacks tensor {name}", tensor=name)


def _check_readable(
    checkpoint: Checkpoint, instance: Instance, members: list[tuple[TensorInfo, ...]]
) -> None:
    for info in (info for member in members for info in member):
        if info.dtype not in READABLE and not instance.rule.kind:
            raise ModelError(
                f"{info.path}: tensor {info.name} has type {info.dtype}; "
                f"{', '.join(READABLE)} can be converted",
                tensor=info.name,
            )
        if 0 in info.shape or not info.shape:
            raise _misshapen(info, "which is empty")


def _output(
    instance: Instance,
    members: list[tuple[TensorInfo, ...]],
    d: Dims,
    made_shape: Callable[[Into, Shapes], Shape],
) -> OutputTensor:
    rule = instance.rule
    sources, is_stack = [member[0] for member in members], -1 not in instance.members
    if other := next((s for s in sources if s.shape != sources[0].shape), None):
        raise _misshapen(other, f"and {sources[0].name} {list(sources[0].shape)}")
    if is_stack and len(sources[0].shape) == 1:  # In a stack, a vector becomes a row.
        sources = [replace(source, shape=(1, *source.shape)) for source in sources]
    if rule.make is None:
        shape, pieces = _parts(rule, sources, d)
    else:
        n_parts = sources[0].shape[0] if rule.per_expert else 0
        shape = made_shape(rule, tuple(s.shape[rule.per_expert :] for s in members[0]))
        n_rows = math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
        make = partial(_made, rule, d, shape)
        pieces = [
            RowSpan(member, n_rows, make=make, part=part, n_parts=n_parts)
            for member in members
            for part in range(n_parts or 1)
        ]
        shape = (n_parts, *shape) if n_parts else shape
    if is_stack:
        shape = (len(members), *(shape[1:] if len(members[0][0].shape) == 1 else shape))
    return OutputTensor(
        instance.name, shape, tuple(pieces), rule.plus, rule.keep_f32, kind=rule.kind
    )


def _parts(rule: Into, sources: list[TensorInfo], d: Dims) -> tuple[Shape, list[RowSpan]]:
    """The shape that one source contributes, and the row ranges of all sources."""
    i, n = rule.part
    first, shape = sources[0], list(sources[0].shape)
    axis = max(0, len(shape) - 2)
    if shape[axis] % n:
        raise _misshapen(first, f"which cannot be cut into {n} parts")
    if rule.interleaved and (d.head_dim % 2 or first.n_rows % d.head_dim):
        raise _misshapen(first, f"which is not a whole number of heads of {d.head_dim} rows")
    shape[axis] //= n
    heads = d.head_dim if rule.interleaved else 0
    if n == 1:
        return tuple(shape), [RowSpan((s,), s.n_rows, head_rows=heads) for s in sources]
    n_experts = math.prod(shape[:axis])  # Each expert of a fused stack has all parts.
    count = first.n_rows // n_experts // n
    return tuple(shape), [
        RowSpan((source,), count, (n * expert + i) * count)
        for source in sources
        for expert in range(n_experts)
    ]


def _made_shape(d: Dims, rule: Into, shapes: Shapes) -> Shape:
    """The shape that a rule's `make` returns for sources of these shapes."""
    # Broadcasting one byte gives a source of the right shape that takes no memory.
    blanks = [np.broadcast_to(np.zeros((), np.uint8), shape) for shape in shapes]
    *rows, last = _call(rule, blanks, d).shape
    if rule.kind:
        block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[rule.kind]]
        *rows, last = *rows[:-1], rows[-1] * block
    return (*rows, last)


def _made(rule: Into, d: Dims, shape: Shape, sources: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    made, n_values = _call(rule, sources, d), math.prod(shape)
    if made.size != (size_bytes(rule.kind, n_values) if rule.kind else n_values):
        # The shape is that of the first member; the sources of this one have others.
        raise ModelError(f"{rule.target} cannot be made of tensors of different shapes")
    return np.ascontiguousarray(made)


def _call(rule: Into, sources: list[npt.NDArray[Any]], d: Dims) -> npt.NDArray[Any]:
    assert rule.make is not None
    try:
        made = rule.make(sources, d)
    except (ValueError, IndexError):  # The shapes cannot be cut or joined.
        made = np.empty(0)
    if made.size == 0 or not made.shape:
        shapes = ", ".join(str(list(source.shape)) for source in sources)
        raise ModelError(
            f"{rule.target} cannot be made of tensors of shapes {shapes}", tensor=rule.target
        )
    return made


def _misshapen(source: TensorInfo, why: str) -> ModelError:
    return ModelError(
        f"tensor {source.name} in {source.path.name} has shape {list(source.shape)}, {why}",
        tensor=source.name,
    )


def _tie_head(
    checkpoint: Checkpoint, family: Family, outputs: dict[str, OutputTensor], config: Config
) -> None:
    """Tie the output head to the embedding, or not, as `config.json` and llama.cpp require. Like
    transformers, this keeps a head that differs from the embedding, whatever `config.json` says."""
    head, embedding = outputs.get("output.weight"), outputs.get("token_embd.weight")
    tied = config.flag("tie_word_embeddings", default=head is None)
    if not tied and head is None:
        raise ModelError(f"{config.name}: tie_word_embeddings is false, but there is no lm_head")
    if head is not None and embedding is not None and (tied or family.head == "never"):
        tied = _are_equal(checkpoint, head, embedding)
    if not tied and family.head == "never":
        raise ModelError(
            f"{checkpoint.folder} has an output head that differs from its embedding, but "
            f"llama.cpp's {family.architecture} has no head of its own"
        )
    if tied:
        outputs.pop("output.weight", None)
        if family.head == "always" and embedding is not None:
            outputs["output.weight"] = replace(embedding, name="output.weight")


def _are_equal(checkpoint: Checkpoint, one: OutputTensor, other: OutputTensor) -> bool:
    (piece,), (beside,) = one.pieces, other.pieces
    step = max(1, _COMPARED_VALUES // one.row_length)
    parts = ((i, min(step, piece.n_rows - i)) for i in range(0, piece.n_rows, step))
    return one.shape == other.shape and all(
        np.array_equal(piece.read(checkpoint, *part), beside.read(checkpoint, *part))
        for part in parts
    )


def _position(tensor: OutputTensor) -> tuple[int, str]:
    """Sort key: embeddings, then layer by layer, then the rest, as a loader reads them."""
    match = re.match(r"blk\.(\d+)\.", tensor.name)
    if match:
        return int(match[1]) + 1, tensor.name
    return (0 if tensor.name.startswith(("token", "position", "rope")) else 1 << 30), tensor.name
