"""The facts about a model in its GGUF file: architecture, sizes, names.

Runs in any thread of any process, on bytes that `layout` has checked. Nothing is guessed and
nothing has a default: a value that the file lacks is `None`. `servable` refuses a file without the
values that the worker needs.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import NoReturn

import msgspec

from worker.errors import ConfigError, ModelError
from worker.models.gguf.constants import constants
from worker.models.gguf.faults import unusable
from worker.models.gguf.layout import GgufLayout, Scalar, fits, read_layout
from worker.models.gguf.tensors import TensorEntry
from worker.setting_files import version_of

TOKENIZER_KINDS = {
    "gpt2": "gguf-bpe",
    "gemma4": "gguf-bpe",
    "llama": "gguf-spm",
    "bert": "gguf-wpm",
    "t5": "gguf-ugm",
}
"""Our names of tokenizers by the file's; any other is `gguf-` and the file's name."""

_TYPES = {bool: "bool", int: "int64", float: "float32", str: "string"}
"""GGUF types of overrides whose keys the file does not have."""
_PART = re.compile(r"(?P<stem>.*[^/])-\d{5}-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufHeader(GgufLayout):
    """Everything before the weights of a model. Sizes and tensors are those of all parts of a split
    one, the rest is the first part's."""

    parts: tuple[Path, ...]
    """All files of the model in order; only `path` if it is not split."""
    architecture: str
    name: str | None
    quant_kind: str
    """`Q4_K_M`, `Q8_0`, `BF16`…"""
    tokenizer_kind: str | None
    vocab_size: int | None
    context_length: int | None
    embedding_length: int | None
    block_count: int | None
    head_count: int | None
    """The largest of any layer, if they differ; likewise for `head_count_kv`."""
    head_count_kv: int | None
    chat_template: str | None
    pooling: str | None
    overridden: dict[str, Scalar]
    """Metadata values that replace those of the file, or are added to them."""

    def summary(self) -> dict[str, Scalar]:
        """The metadata in the file's order, each array as `[n items]`."""
        return {
            key: str(self.arrays[key]) if key in self.arrays else self.metadata[key]
            for key in self.types
        }

    def named_template(self, name: str | None = None) -> str | None:
        """The chat template of this name (`tool_use`…), or the default one; `None` without it."""
        if name is None:
            return self.chat_template
        text = self.metadata.get(f"tokenizer.chat_template.{name}")
        return None if text is None else str(text)

    def tensor_types(self) -> dict[str, int]:
        """Bytes by tensor type, the largest first."""
        return dict(_bytes_by_type(self.tensors).most_common())

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def n_params(self) -> int:
        return sum(tensor.n_elements for tensor in self.tensors)

    @property
    def lengths_differ(self) -> bool:
        """Whether rotary angles depend on a context's longest allowed sequence (LongRoPE)."""
        return any("rope_factors_long" in tensor.name for tensor in self.tensors)


def read_header(path: Path | str) -> GgufHeader:
    """Read and check a GGUF's header, metadata and tensor table, for every part if it is split.

    Raises `ModelError` naming the file and the first fault.
    """
    path = Path(path)
    layout = read_layout(path)
    header = _header_of(layout)
    count = layout.unsigned(constants().Keys.Split.LLM_KV_SPLIT_COUNT) or 0
    return header if count <= 1 else _join_parts(header, count)


def packed(header: GgufHeader) -> bytes:
    """The header as bytes for another process, which unpacks them with `current_header`."""
    return msgspec.msgpack.encode(header, enc_hook=os.fsencode)


def current_header(known: bytes | None, path: Path) -> GgufHeader:
    """The `known` header if the model's files have not changed since, else one read anew."""
    if known is not None:
        header = msgspec.msgpack.decode(known, type=GgufHeader, dec_hook=_path)
        if header.path == path and tuple(map(version_of, header.parts)) == header.read_from:
            return header
    return read_header(path)


def _path(kind: type, data: bytes) -> Path:
    return Path(os.fsdecode(data))


def parts_beside(path: Path) -> list[Path]:
    """All files of the model whose first part, or only file, is `path`."""
    return [path.with_name(name) for name in split_names(path.name)]


def split_names(name: str) -> tuple[str, ...]:
    """The names of all parts if `name` is one by llama.cpp's naming, else `name` alone."""
    match = _PART.fullmatch(name)
    if match is None:
        return (name,)
    count = int(match["count"])
    names = tuple(f"{match['stem']}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1))
    return names if name in names else (name,)


def _header_of(layout: GgufLayout) -> GgufHeader:
    keys = constants().Keys
    general, tokenizer, llm = keys.General, keys.Tokenizer, keys.LLM
    architecture = layout.text(general.ARCHITECTURE)
    if architecture is None:
        raise unusable(layout.path, f"its metadata has no {general.ARCHITECTURE}")
    tokens = layout.arrays.get(tokenizer.LIST)
    if tokens is not None and tokens.item_type != "string":
        raise unusable(layout.path, f"{tokenizer.LIST} is not an array of strings")
    return GgufHeader(
        **{each.name: getattr(layout, each.name) for each in fields(GgufLayout)},
        parts=(layout.path,),
        architecture=architecture,
        name=layout.text(general.NAME),
        quant_kind=_quant_kind(layout.unsigned(general.FILE_TYPE), layout.tensors),
        tokenizer_kind=_tokenizer_kind(layout.text(tokenizer.MODEL)),
        vocab_size=tokens.length if tokens else layout.unsigned(llm.VOCAB_SIZE),
        context_length=layout.unsigned(llm.CONTEXT_LENGTH),
        embedding_length=layout.unsigned(llm.EMBEDDING_LENGTH),
        block_count=layout.unsigned(llm.BLOCK_COUNT),
        head_count=layout.largest(keys.Attention.HEAD_COUNT),
        head_count_kv=layout.largest(keys.Attention.HEAD_COUNT_KV),
        chat_template=layout.text(tokenizer.CHAT_TEMPLATE),
        pooling=_pooling(layout.unsigned(llm.POOLING_TYPE), layout.path),
        overridden={},
    )


def with_metadata(header: GgufHeader, values: Mapping[str, Scalar]) -> GgufHeader:
    """The header as if its file had these values; `{arch}` in a key stands for its architecture.

    Raises `ConfigError` for a key that cannot be overridden, or a value of another type.
    """
    if not values:
        return header
    changes = {key.replace("{arch}", header.architecture): value for key, value in values.items()}
    types = dict(header.types)
    for key, value in changes.items():
        if key == constants().Keys.General.ALIGNMENT or key.startswith("split."):
            _refuse_override(key, "it describes the file, not the model")
        kind = types.setdefault(key, _TYPES[type(value)])
        if kind == "array":
            _refuse_override(
                key, "it is a list in the file, and llama.cpp reads lists from the file alone"
            )
        if not fits(kind, value):
            _refuse_override(key, f"{value!r} does not fit its type, {kind}")
    changed = _header_of(replace(header, metadata={**header.metadata, **changes}, types=types))
    pooling_key = constants().Keys.LLM.POOLING_TYPE.format(arch=changed.architecture)
    return replace(
        changed,
        parts=header.parts,
        pooling="none" if changes.get(pooling_key) == 0 else changed.pooling,
        overridden=changes,
    )


def _refuse_override(key: str, why: str) -> NoReturn:
    message = f"--override-kv cannot change {key}: {why}."
    raise ConfigError(message, field="override_kv")


def _join_parts(header: GgufHeader, count: int) -> GgufHeader:
    path, keys = header.path, constants().Keys
    paths = parts_beside(path)
    if len(paths) != count or path != paths[0]:
        match = _PART.fullmatch(path.name)
        first = f"{match['stem'] if match else path.stem}-00001-of-{count:05}.gguf"
        raise ModelError(
            f"{str(path)!r} is one of {count} parts of a split model; give its first part, "
            f"named {first!r}, with the others beside it.",
            path=str(path),
        )
    if header.unsigned(keys.Split.LLM_KV_SPLIT_NO) != 0:
        raise unusable(path, "it is named as the first part of a split model but is not")
    tensors = list(header.tensors)
    size_bytes, read_from = header.size_bytes, header.read_from
    for number, other in enumerate(paths[1:], start=1):
        part = read_layout(other)
        named = part.unsigned(keys.Split.LLM_KV_SPLIT_NO)
        if named != number or part.unsigned(keys.Split.LLM_KV_SPLIT_COUNT) != count:
            raise unusable(other, f"it does not say that it is part {number + 1} of {count}")
        tensors += part.tensors
        size_bytes += part.size_bytes
        read_from += part.read_from
    names = Counter(tensor.name for tensor in tensors)
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise unusable(path, f"the tensor {twice[0]!r} occurs in two of its parts")
    expected = header.unsigned(keys.Split.LLM_KV_SPLIT_TENSORS_COUNT)
    if expected != len(tensors):
        raise unusable(path, f"its parts hold {len(tensors)} tensors, but it announces {expected}")
    return replace(
        header,
        parts=tuple(paths),
        size_bytes=size_bytes,
        read_from=read_from,
        tensors=tuple(tensors),
        quant_kind=_quant_kind(header.unsigned(keys.General.FILE_TYPE), tuple(tensors)),
    )


@cache
def _file_types() -> dict[int, str]:
    names = {int(t): re.sub("^(MOSTLY|ALL)_", "", t.name) for t in constants().LlamaFileType}
    # NOTE: the pinned llama.cpp knows this type; the released gguf package does not yet.
    names.setdefault(41, "Q2_0")
    return names


def _quant_kind(file_type: int | None, tensors: tuple[TensorEntry, ...]) -> str:
    """The quantization that the file states, else the tensor type with the most bytes."""
    name = _file_types().get(file_type) if file_type is not None else None
    if name is not None and name != "GUESSED":
        return name
    by_type = _bytes_by_type(tensors)
    return by_type.most_common(1)[0][0] if by_type else "none"


def _bytes_by_type(tensors: tuple[TensorEntry, ...]) -> Counter[str]:
    counter: Counter[str] = Counter()
    for tensor in tensors:
        counter[tensor.type_name] += tensor.n_bytes
    return counter


def _tokenizer_kind(model: str | None) -> str | None:
    if model is None or model in ("no_vocab", "none"):
        return None
    return TOKENIZER_KINDS.get(model, f"gguf-{model}")


def _pooling(number: int | None, path: Path) -> str | None:
    types = constants().PoolingType
    if number is None or number == types.NONE:
        return None
    if number not in set(types):
        raise unusable(path, f"it names the unknown pooling type {number}")
    return str(types(number).name.lower())
