"""Plans the output: each GGUF tensor as row ranges of source tensors.

The plan is made from the checkpoint's headers and the family's table. A missing, surplus or
misshapen tensor is an error before the first byte is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.convert.checkpoint import READABLE, Checkpoint, TensorInfo
from worker.convert.config import Config
from worker.convert.family.rules import Family, Make, Rule
from worker.convert.family.sizes import Dims, extents
from worker.convert.quantize import size_bytes
from worker.errors import ModelError


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Consecutive rows of an output tensor that come from one source tensor, or from several."""

    source: TensorInfo
    first_row: int
    n_rows: int
    head_rows: int = 0
    """Rows per rotary head, whose two halves are interleaved; 0 keeps the order."""
    make: Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]] | None = None
    """Computes all rows at once from the whole of `source` and of `also`."""
    also: tuple[TensorInfo, ...] = ()
    part: int = 0
    n_parts: int = 1
    """`make` gets part number `part` of `n_parts` equal parts of each source's first axis."""
    is_zeros: bool = False

    def read(self, checkpoint: Checkpoint, first: int, count: int) -> npt.NDArray[Any]:
        """`count` rows of this piece from `first` on, in output order and the source's own type."""
        if self.make is not None:
            sources = (self.source, *self.also)
            made = self.make([checkpoint.read(s, self.part, self.n_parts) for s in sources])
            return made.reshape(self.n_rows, -1)[first : first + count]
        if self.is_zeros:
            return np.zeros((count, self.source.row_length), READABLE[self.source.dtype])
        rows = checkpoint.read_rows(self.source, self.first_row + first, count)
        if self.head_rows:
            halves = rows.reshape(count // self.head_rows, 2, self.head_rows // 2, -1)
            return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
        return rows


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the GGUF; `shape` in row-major order."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[RowSpan, ...]
    plus: float = 0.0
    times: float = 1.0
    keep_f32: bool = False
    kind: str = ""
    """The ggml type of the bytes in the pieces; if empty, the output type decides."""
    values: npt.NDArray[np.float32] | None = None
    """Values computed from the configuration; such a tensor has no pieces."""

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
        ModelError: the checkpoint lacks a tensor, has one that no rule knows, or one of a wrong
            shape.
    """
    names = checkpoint.tensors
    if d.kinds and len(d.kinds) != d.n_layers:
        raise ModelError(f"{config.name} gives {len(d.kinds)} kinds of layers for {d.n_layers}")
    outputs: dict[str, OutputTensor] = {}
    for name, values in family.extra_tensors(config, d).items():
        outputs[name] = OutputTensor(name, values.shape, (), values=values)
    instances = list(_instances(family, names, d))
    for instance in instances:
        found = [tuple(names[s] for s in member if s in names) for member in instance.members]
        if sum(map(len, found)) == sum(map(len, instance.members)):
            made = _output(instance, found, d)
            if (other := outputs.get(made.name)) is not None and other.pieces:
                raise ModelError(
                    f"tensors {other.pieces[0].source.name} and {found[0][0].name} both become "
                    f"{made.name}",
                    tensor=made.name,
                )
            outputs[made.name] = made
    if family.head != "none":
        _tie_head(family, outputs, config)
    _check_complete(instances, outputs, checkpoint)
    _check_surplus(instances, family, names, d)
    return sorted(outputs.values(), key=_position)


@dataclass(frozen=True, slots=True)
class Instance:
    """A rule in one layer."""

    rule: Rule
    name: str
    """In the GGUF."""
    shape: tuple[int, ...]
    members: list[tuple[str, ...]]
    """Names of its sources; a stack has several members."""


def _instances(family: Family, names: Mapping[str, TensorInfo], d: Dims) -> Iterator[Instance]:
    moved = _moved(family, names)
    for rule in (rule for rules in family.rules.values() for rule in rules):
        sources = [moved(source) for source in (rule.origin.source, *rule.origin.also)]
        for i in range(d.n_layers) if "{i}" in rule.target else (0,):
            kinds = d.kinds[i].split() if "{i}" in rule.target and d.kinds else []
            if rule.on and rule.on not in kinds:
                continue
            shape = next((rule.shapes[kind] for kind in kinds if kind in rule.shapes), rule.shape)
            size = extents(shape, d)
            here = [source.replace("{i}", str(i)) for source in sources]
            members = range(size[0]) if "{e}" in here[0] else (0,)
            stacked = [tuple(name.replace("{e}", str(e)) for name in here) for e in members]
            yield Instance(rule, rule.target.replace("{i}", str(i)), size, stacked)


def _moved(family: Family, names: Mapping[str, TensorInfo]) -> Callable[[str], str]:
    """Renames sources to the prefix that this checkpoint's tensor names have."""
    first, heads = family.roots[0], ("lm_head.", "language_model.lm_head.")
    head = next((h for h in heads if f"{h}weight" in names), heads[0])

    def moved(source: str, root: str) -> str:
        if source.startswith(heads[0]):
            return head + source.removeprefix(heads[0])
        return root + source.removeprefix(first) if source.startswith(first) else source

    embeddings = [
        source
        for source, rules in family.rules.items()
        if any(rule.target == "token_embd.weight" for rule in rules)
    ]
    for root in family.roots:
        if any(moved(source, root) in names for source in embeddings):
            return partial(moved, root=root)
    return partial(moved, root=first)


def _output(instance: Instance, members: list[tuple[TensorInfo, ...]], d: Dims) -> OutputTensor:
    rule, name, shape = instance.rule, instance.name, instance.shape
    for info in (info for member in members for info in member):
        if not info.is_readable and not rule.origin.kind:
            raise ModelError(
                f"{info.path}: tensor {info.name} has type {info.dtype}; "
                f"{', '.join(READABLE)} can be converted",
                tensor=info.name,
            )
    if rule.origin.make is not None:
        return _made_output(instance, members, d)
    sources = [member[0] for member in members]
    if len(shape) > 1:  # In a stack, a vector becomes a row.
        sources = [replace(s, shape=(1, *s.shape)) if len(s.shape) == 1 else s for s in sources]
    pieces = [piece for source in sources for piece in _pieces(rule, source, shape, d, sources)]
    columns = shape[-1] if len(shape) > 1 else 1
    (times,) = d.scales[rule.times] if rule.times else (1.0,)
    same_size = sum(p.n_rows for p in pieces) * columns == math.prod(shape)
    if not same_size or sources[0].row_length != columns:
        raise _misshapen(sources[0], shape)
    return OutputTensor(name, shape, tuple(pieces), rule.plus, times, rule.keep_f32)


def _made_output(
    instance: Instance, members: list[tuple[TensorInfo, ...]], d: Dims
) -> OutputTensor:
    rule, name, shape = instance.rule, instance.name, instance.shape
    origin = rule.origin
    assert origin.make is not None
    n_parts = d.n_expert if origin.per_expert else 1
    row_length = shape[-1] if len(shape) > 1 else 1
    n_rows = math.prod(shape) // row_length // len(members) // n_parts
    size = n_rows * (size_bytes(origin.kind, row_length) if origin.kind else row_length)
    make = partial(_made, origin.make, d, name, size)
    pieces = [
        RowSpan(first, 0, n_rows, make=make, also=tuple(also), part=part, n_parts=n_parts)
        for first, *also in members
        for part in range(n_parts)
    ]
    if origin.per_expert and any(info.shape[0] != n_parts for m in members for info in m):
        raise _misshapen(members[0][0], shape)
    return OutputTensor(name, shape, tuple(pieces), rule.plus, 1.0, rule.keep_f32, origin.kind)


def _made(
    make: Make, d: Dims, name: str, size: int, sources: list[npt.NDArray[Any]]
) -> npt.NDArray[Any]:
    try:
        made = make(sources, d)
    except ValueError:  # The shapes cannot be cut or joined.
        made = np.empty(0)
    if made.size != size:
        shapes = ", ".join(str(list(source.shape)) for source in sources)
        raise ModelError(f"{name} cannot be made of tensors of shapes {shapes}", tensor=name)
    return made


def _pieces(
    rule: Rule, source: TensorInfo, shape: tuple[int, ...], d: Dims, stack: list[TensorInfo]
) -> Iterator[RowSpan]:
    if source.shape != stack[0].shape:
        raise _misshapen(source, stack[0].shape)
    if rule.origin.rows is None:
        n_missing = shape[0] - source.n_rows if rule.origin.pads_rows else 0
        if n_missing > 0 and source.row_length == shape[-1]:
            yield RowSpan(source, 0, source.n_rows)
            yield RowSpan(source, 0, n_missing, is_zeros=True)
            return
        if len(stack) == 1 and source.shape != shape:
            raise _misshapen(source, shape)
        yield RowSpan(source, 0, source.n_rows, d.head_dim if rule.interleaved else 0)
        return
    first, count = extents(rule.origin.rows, d)
    # In a stack of fused tensors, each member has the wanted rows.
    members = shape[0] if len(shape) > 2 else 1
    stride = source.n_rows // members
    if first + count > stride:
        raise _misshapen(source, shape)
    for member in range(members):
        yield RowSpan(source, member * stride + first, count)


def _misshapen(source: TensorInfo, shape: tuple[int, ...]) -> ModelError:
    return ModelError(
        f"tensor {source.name} in {source.path.name} has shape {list(source.shape)}, "
        f"which does not give the {list(shape)} that config.json asks for",
        tensor=source.name,
    )


def _tie_head(family: Family, outputs: dict[str, OutputTensor], config: Config) -> None:
    """Tie the output head to the embedding, or not, as `config.json` and llama.cpp require."""
    head, embedding = outputs.get("output.weight"), outputs.get("token_embd.weight")
    tied = config.flag("tie_word_embeddings", default=head is None)
    if not tied and head is None:
        raise ModelError(f"{config.name}: tie_word_embeddings is false, but there is no lm_head")
    if not tied and family.head == "never":
        raise ModelError(
            f"{config.name}: tie_word_embeddings is false, llama.cpp's {family.architecture} "
            "has no output head of its own"
        )
    if tied:
        outputs.pop("output.weight", None)
        if family.head == "always" and embedding is not None:
            outputs["output.weight"] = replace(embedding, name="output.weight")


def _check_complete(
    instances: Sequence[Instance], outputs: Mapping[str, OutputTensor], checkpoint: Checkpoint
) -> None:
    for instance in instances:
        if not instance.rule.optional and instance.name not in outputs:
            sources = (source for member in instance.members for source in member)
            missing = next(source for source in sources if source not in checkpoint.tensors)
            raise ModelError(
                f"{checkpoint.folder} lacks tensor {missing}, which becomes {instance.name}",
                tensor=missing,
            )


def _check_surplus(
    instances: Sequence[Instance], family: Family, names: Mapping[str, TensorInfo], d: Dims
) -> None:
    """Refuse a tensor that no rule uses: without it, the model would silently be another one."""
    known = {s for instance in instances for member in instance.members for s in member}
    for name in names.keys() - known:
        layer = re.search(r"layers\.(\d+)\.", name)
        if family.ignores_extra_layers and layer and int(layer[1]) >= d.n_layers:
            continue
        if not any(re.fullmatch(p, name) for p in family.ignored):
            raise ModelError(
                f"tensor {name} in {names[name].path.name} is not known to the "
                f"{family.architecture} family with the sizes in config.json",
                tensor=name,
            )


def _position(tensor: OutputTensor) -> tuple[int, str]:
    """Sorts embeddings first, then layer by layer, in the order in which a loader reads them."""
    match = re.match(r"blk\.(\d+)\.", tensor.name)
    if match:
        return int(match[1]) + 1, tensor.name
    return (0 if tensor.name.startswith(("token", "position", "rope")) else 1 << 30), tensor.name
