"""The forms of a tokenizer's JSON files, as far as the converter reads them: a value of another
type, or a missing one, is refused with its place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from worker.errors import ModelError

_Pair = Annotated[str, msgspec.Meta(pattern=" ")] | tuple[str, str]


class _Added(msgspec.Struct):
    content: str


class _AddedWithId(_Added):
    id: int


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    type: str | None = None
    merges: list[_Pair] = []
    unk_token: str | None = None
    unk_id: int | None = None
    continuing_subword_prefix: str | None = None
    max_input_chars_per_word: int = 100

    def __post_init__(self) -> None:
        if isinstance(self.vocab, list) != (self.type == "Unigram"):
            raise ValueError("Only the vocab of a Unigram is an array")


class _Piece(msgspec.Struct):
    id: str


class _Ids(msgspec.Struct):
    ids: list[int]


class _Step(msgspec.Struct):
    """A step of a normalizer, pre-tokenizer or post-processor, or several."""

    type: str | None = None
    normalizers: list[_Step] | None = None
    pretokenizers: list[_Step] | None = None
    processors: list[_Step] | None = None
    precompiled_charsmap: bytes | None = None
    cls: tuple[str, int] | None = None
    sep: tuple[str, int] | None = None
    single: list[dict[str, _Piece]] | None = None
    pair: list[dict[str, _Piece]] | None = None
    special_tokens: dict[str, _Ids] = {}

    def __post_init__(self) -> None:
        if self.type in ("BertProcessing", "RobertaProcessing") and not (self.cls and self.sep):
            raise ValueError("Object missing required field `cls` or `sep`")
        pieces = [*(self.single or ()), *(self.pair or ())]
        used = {each["SpecialToken"].id for each in pieces if "SpecialToken" in each}
        if lacking := used - self.special_tokens.keys():
            raise ValueError(f"special_tokens lacks {min(lacking)!r}")


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedWithId] | None = None
    normalizer: _Step | None = None
    pre_tokenizer: _Step | None = None
    post_processor: _Step | None = None


class _Template(msgspec.Struct):
    name: str
    template: str


class _Templates(msgspec.Struct):
    chat_template: str | dict[str, str] | list[_Template] | None = None


class _Settings(_Templates):
    added_tokens_decoder: dict[int, _Added] | None = None


class _Ranked(msgspec.Struct):
    rank: int
    token_bytes: bytes


class _Special(msgspec.Struct):
    rank: int
    token_str: str


class _Sizes(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Tekken(msgspec.Struct):
    config: _Sizes
    vocab: list[_Ranked]
    special_tokens: list[_Special] | None = None


_FORMS: Mapping[str, Any] = {
    "tokenizer.json": _Tokenizer,
    "tokenizer_config.json": _Settings,
    "chat_template.json": _Templates,
    "added_tokens.json": dict[str, int],
    "tekken.json": _Tekken,
}


def check(path: Path, value: Mapping[str, Any]) -> None:
    """Raise `ModelError` if the file's value does not have its form."""
    try:
        msgspec.convert(value, _FORMS.get(path.name, Any), str_keys=True)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}", path=str(path)) from None
