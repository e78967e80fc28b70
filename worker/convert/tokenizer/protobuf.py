"""Reads one protobuf message, SentencePiece's `ModelProto`.

This is a wire-format reader for the few fields that are used, so no protobuf library is needed.
Every length is checked against the bytes that are there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeVar

from worker.errors import ModelError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_Fields = dict[int, list[int | float | bytes]]
_Value = TypeVar("_Value", int, float, bytes)


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    kind: int
    """Numbered as in `tokenizer.ggml.token_type`."""


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    pieces: list[Piece]
    algorithm: int
    """1 is Unigram, 2 is BPE."""
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    charsmap: bytes
    unk_id: int
    bos_id: int
    eos_id: int


def read_model(data: bytes, name: str) -> SentencePieceModel:
    """Raise `ModelError` if the bytes are not a `ModelProto`."""
    try:
        return _model(data)
    except (ValueError, IndexError, struct.error, UnicodeDecodeError):
        raise ModelError(f"{name} is not a SentencePiece model", path=name) from None


def _model(data: bytes) -> SentencePieceModel:
    found = _fields(data)
    # Messages that are there more than once are merged, which is what joining their bytes does.
    trainer, normalizer = (_fields(b"".join(_all(found, i, b""))) for i in (2, 3))
    model = SentencePieceModel(
        [_piece(_fields(each)) for each in _all(found, 1, b"")],
        _last(trainer, 3, 1),
        bool(_last(normalizer, 3, 1)),
        bool(_last(normalizer, 4, 1)),
        _last(normalizer, 2, b""),
        *(_last(trainer, number, i) for i, number in enumerate((40, 41, 42))),
    )
    if not model.pieces:
        raise ValueError("no pieces")
    return model


def _piece(fields: _Fields) -> Piece:
    return Piece(_last(fields, 1, b"").decode("utf-8"), _last(fields, 2, 0.0), _last(fields, 3, 1))


def _all(fields: _Fields, number: int, default: _Value) -> list[_Value]:
    """The values of a field that are of the default's type."""
    return [value for value in fields.get(number, ()) if isinstance(value, type(default))]


def _last(fields: _Fields, number: int, default: _Value) -> _Value:
    return (_all(fields, number, default) or [default])[-1]


def _fields(data: bytes) -> _Fields:
    """The values of each field, in the order in which they come."""
    found: _Fields = {}
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        value: int | float | bytes
        wire = key & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            # A negative int32 is stored as 64 bits in two's complement.
            value -= value >> 63 << 64
        elif wire == _BYTES:
            length, position = _varint(data, position)
            if position + length > len(data):
                raise ValueError("a field is longer than the message")
            value, position = data[position : position + length], position + length
        elif wire in (_FIXED32, _FIXED64):
            code = "<f" if wire == _FIXED32 else "<d"
            (value,) = struct.unpack_from(code, data, position)
            position += struct.calcsize(code)
        else:
            raise ValueError("unknown wire type")
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")
