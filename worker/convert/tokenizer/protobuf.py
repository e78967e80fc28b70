"""Reads one protobuf message, SentencePiece's `ModelProto`.

This is a wire-format reader for the few fields that are used, so no protobuf library is needed.
Every length is checked against the bytes that are there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from worker.errors import ModelError

_TRAINER = {3: "algorithm", 40: "unk_id", 41: "bos_id", 42: "eos_id"}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    kind: int
    """Numbered as in `tokenizer.ggml.token_type`."""


@dataclass(slots=True)
class SentencePieceModel:
    pieces: list[Piece] = field(default_factory=list)
    algorithm: int = 1
    """1 is Unigram, 2 is BPE."""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    charsmap: bytes = b""
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2


def read_model(data: bytes, name: str) -> SentencePieceModel:
    """
    Raises:
        ModelError: the bytes are not a `ModelProto`.
    """
    try:
        return _model(data)
    except (ValueError, IndexError, struct.error, UnicodeDecodeError):
        raise ModelError(f"{name} is not a SentencePiece model", path=name) from None


def _model(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            model.pieces.append(_piece(value))
        elif number == 2 and isinstance(value, bytes):
            for key, setting in _fields(value):
                if key in _TRAINER and isinstance(setting, int):
                    # A negative int32 is stored as 64 bits in two's complement.
                    setattr(model, _TRAINER[key], setting - (1 << 64) if setting >> 63 else setting)
        elif number == 3 and isinstance(value, bytes):
            for key, setting in _fields(value):
                if key == 2 and isinstance(setting, bytes):
                    model.charsmap = setting
                elif isinstance(setting, int) and key == 3:
                    model.add_dummy_prefix = bool(setting)
                elif isinstance(setting, int) and key == 4:
                    model.remove_extra_whitespaces = bool(setting)
    if not model.pieces:
        raise ValueError("no pieces")
    return model


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, 1
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes | float]]:
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield number, value
        elif wire == _BYTES:
            length, position = _varint(data, position)
            if position + length > len(data):
                raise ValueError("a field is longer than the message")
            yield number, data[position : position + length]
            position += length
        elif wire == _FIXED32:
            yield number, float(struct.unpack_from("<f", data, position)[0])
            position += 4
        elif wire == _FIXED64:
            position += 8
        else:
            raise ValueError("unknown wire type")


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
