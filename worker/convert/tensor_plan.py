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
from itertools import count
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from worker.convert.checkpoint import READABLE, Checkpoint
from worker.convert.config import Config
from worker.convert.family.dims import Dims
from worker.convert.family.metadata import extra_tensors
from worker.convert.family.rules import Family, Rule
from worker.convert.quantize import size_bytes
from worker.errors import ModelError
from worker.models.safetensors import TensorInfo


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
    n_parts: int = 0
    """`make` gets number `part` of the `n_parts` of each source's first axis; 0: all of it."""

    def read(self, checkpoint: Checkpoint, first: int, count: int) -> npt.NDArray[Any]:
        """`count` rows of this piece from `first` on, in output order and the source's own type."""
        if self.make is not None:
            sources = (self.source, *self.also)
            made = self.make([checkpoint.read(s, self.part, self.n_parts) for s in sources])
            return made.reshape(self.n_rows, -1)[first : first + count]
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
    keep_f32: bool = False
    kind: str = ""
    """The ggml type to write; in a plan it is empty where the output type decides."""
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
    for name, values in extra_tensors(family, config, d).items():
        outputs[name] = OutputTensor(name, values.shape, (), values=values)
    instances = list(_instances(family, names, d))
    shapes = _MadeShapes(d)
    for instance in instances:
        found = [tuple(names[s] for s in member if s in names) for member in instance.members]
        if sum(map(len, found)) == sum(map(len, instance.members)):
            _check_readable(checkpoint, instance, found)
            made = _output(instance, found, d, shapes)
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
            here = [source.replace("{i}", str(i)) for source in sources]
            yield Instance(rule, rule.target.replace("{i}", str(i)), _members(here, names))


def _members(sources: Sequence[str], names: Mapping[str, TensorInfo]) -> list[tuple[str, ...]]:
    """The sources themselves, or those of each member of a stack, as many as there are."""
    if "{e}" not in sources[0]:
        return [tuple(sources)]
    n = next(e for e in count(1) if sources[0].replace("{e}", str(e)) not in names)
    return [tuple(name.replace("{e}", str(e)) for name in sources) for e in range(n)]


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


def _check_readable(
    checkpoint: Checkpoint, instance: Instance, members: list[tuple[TensorInfo, ...]]
) -> None:
    for info in (info for member in members for info in member):
        if not checkpoint.is_readable(info) and not instance.rule.origin.kind:
            raise ModelError(
                f"{info.path}: tensor {info.name} has type {info.dtype}; "
                f"{', '.join(READABLE)} can be converted",
                tensor=info.name,
            )
        if 0 in info.shape or not info.shape:
            raise _misshapen(info, "which is empty")


def _output(
    instance: Instance, members: list[tuple[TensorInfo, ...]], d: Dims, made: _MadeShapes
) -> OutputTensor:
    rule, origin = instance.rule, instance.rule.origin
    sources, is_stack = [member[0] for member in members], "{e}" in origin.source
    if other := next((s for s in sources if s.shape != sources[0].shape), None):
        raise _misshapen(other, f"and {sources[0].name} {list(sources[0].shape)}")
    if is_stack and len(sources[0].shape) == 1:  # In a stack, a vector becomes a row.
        sources = [replace(source, shape=(1, *source.shape)) for source in sources]
    if origin.make is None:
        shape, pieces = _parts(rule, sources, d)
    else:
        n_parts = sources[0].shape[0] if origin.per_expert else 0
        shape = made.of(instance, members[0])
        n_rows = math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
        make = partial(_made, instance, d, shape)
        pieces = [
            RowSpan(first, 0, n_rows, make=make, also=tuple(also), part=part, n_parts=n_parts)
            for first, *also in members
            for part in range(n_parts or 1)
        ]
        shape = (n_parts, *shape) if n_parts else shape
    if is_stack:
        shape = (len(members), *(shape[1:] if len(members[0][0].shape) == 1 else shape))
    return OutputTensor(
        instance.name, shape, tuple(pieces), rule.plus, rule.keep_f32, kind=origin.kind
    )


def _parts(rule: Rule, sources: list[TensorInfo], d: Dims) -> tuple[tuple[int, ...], list[RowSpan]]:
    """The shape of one source's part, and the rows of all."""
    i, n = rule.origin.part
    first, shape = sources[0], list(sources[0].shape)
    axis = max(0, len(shape) - 2)
    if shape[axis] % n:
        raise _misshapen(first, f"which cannot be cut into {n} parts")
    if rule.interleaved and (d.head_dim % 2 or first.n_rows % d.head_dim):
        raise _misshapen(first, f"which is no whole number of heads of {d.head_dim} rows")
    shape[axis] //= n
    heads = d.head_dim if rule.interleaved else 0
    if n == 1:
        return tuple(shape), [RowSpan(source, 0, source.n_rows, heads) for source in sources]
    n_experts = math.prod(shape[:axis])  # Each of a fused stack has the parts.
    count = first.n_rows // n_experts // n
    return tuple(shape), [
        RowSpan(source, (n * expert + i) * count, count)
        for source in sources
        for expert in range(n_experts)
    ]


class _MadeShapes:
    """The shapes that functions make of those of their sources; each is found once."""

    def __init__(self, d: Dims) -> None:
        self._d = d
        self._found: dict[object, tuple[int, ...]] = {}

    def of(self, instance: Instance, sources: tuple[TensorInfo, ...]) -> tuple[int, ...]:
        origin = instance.rule.origin
        shapes = [source.shape[origin.per_expert :] for source in sources]
        if (key := (origin.make, *shapes)) not in self._found:
            # One byte stands for all values, and for each value, whatever its type.
            blanks = [np.broadcast_to(np.zeros((), np.uint8), shape) for shape in shapes]
            *rows, last = _call(instance, blanks, self._d).shape
            if origin.kind:
                block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[origin.kind]]
                *rows, last = *rows[:-1], rows[-1] * block
            self._found[key] = (*rows, last)
        return self._found[key]


def _made(
    instance: Instance, d: Dims, shape: tuple[int, ...], sources: list[npt.NDArray[Any]]
) -> npt.NDArray[Any]:
    made = _call(instance, sources, d)
    n_values = math.prod(shape)
    if kind := instance.rule.origin.kind:
        n_values = size_bytes(kind, n_values)
    if made.size != n_values:  # Of another expert's sources.
        raise ModelError(f"{instance.name} cannot be made of tensors of different shapes")
    return made


def _call(instance: Instance, sources: list[npt.NDArray[Any]], d: Dims) -> npt.NDArray[Any]:
    assert instance.rule.origin.make is not None
    try:
        made = instance.rule.origin.make(sources, d)
    except (ValueError, IndexError):  # The shapes cannot be cut or joined.
        made = np.empty(0)
    if made.size == 0 or not made.shape:
        shapes = ", ".join(str(list(source.shape)) for source in sources)
        raise ModelError(
            f"{instance.name} cannot be made of tensors of shapes {shapes}", tensor=instance.name
        )
    return made


def _misshapen(source: TensorInfo, why: str) -> ModelError:
    return ModelError(
        f"tensor {source.name} in {source.path.name} has shape {list(source.shape)}, {why}",
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
    missing = next((i for i in instances if not i.rule.optional and i.name not in outputs), None)
    if missing is not None:
        named = [i.members[0][0] for i in instances if i.name == missing.name]
        forms = {re.sub(r"\d+", "", name) for name in checkpoint.tensors}  # In any layer.
        name = next((n for n in named if re.sub(r"\d+", "", n) in forms), named[0])
        raise ModelError(
            f"{checkpoint.folder} lacks tensor {name}, which becomes {missing.name}", tensor=name
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
