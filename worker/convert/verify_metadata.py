"""Compares the header of a GGUF, key by key, with the one that its source gives.

The converter's own writer writes the expected header (metadata, vocabulary, token types, merges and
templates) to a temporary file. The same parser then reads both.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from worker.convert import manifest
from worker.convert.output import header, write_header_to
from worker.convert.prepare import Conversion, Options
from worker.errors import ModelError
from worker.models.gguf.layout import GgufArray, GgufLayout, Scalar, read_layout

_QUANTISER_KEYS = ("quantize.imatrix.",)
"""Prefixes of keys that llama.cpp's quantiser adds."""


def check_metadata(conversion: Conversion, file: Path, options: Options) -> None:
    """Compare every key except the result of the token check.

    Raises:
        ModelError: names the first key that is missing, surplus or different.
    """
    with tempfile.TemporaryDirectory(prefix="llorch-convert-") as folder:
        path = Path(folder) / "header.gguf"
        writer = header(conversion.architecture, conversion.metadata, conversion.chat_template)
        write_header_to(writer, path)
        expected, found = read_layout(path), read_layout(file)
        for key in sorted(expected.types.keys() | found.types.keys()):
            of_quantiser = key.startswith(_QUANTISER_KEYS) and options.format.tensor_type is None
            if not of_quantiser and key != manifest.DIFFERENCE:
                _check(key, _difference(key, expected, found))


def check_key(key: str, conversion: Conversion, file: Path) -> None:
    """Compare one key, which holds a text or is absent."""
    wanted, got = conversion.metadata.get(key), read_layout(file).metadata.get(key)
    _check(key, None if wanted == got else f"it is {_text(got)} instead of {_text(wanted)}")


def _check(key: str, difference: str | None) -> None:
    if difference is not None:
        raise ModelError(f"verification of {key} failed: {difference}", key=key)


def _difference(key: str, expected: GgufLayout, found: GgufLayout) -> str | None:
    if key not in expected.types:
        return "its source does not give this key"
    if key not in found.types:
        return f"the file lacks it; it should be {_text(_value(key, expected))}"
    if expected.types[key] != found.types[key]:
        return f"it is of type {found.types[key]} instead of {expected.types[key]}"
    if key in expected.arrays and expected.arrays[key].item_type != found.arrays[key].item_type:
        return f"its items are of type {found.arrays[key].item_type}"
    wanted, got = _value(key, expected), _value(key, found)
    if isinstance(wanted, list) and isinstance(got, list):
        if len(wanted) != len(got):
            return f"it has {len(got)} items instead of {len(wanted)}"
        for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
            if a != b:
                return f"item {i} is {_text(b)} instead of {_text(a)}"
        return None
    return None if wanted == got else f"it is {_text(got)} instead of {_text(wanted)}"


def _value(key: str, layout: GgufLayout) -> Scalar | list[bytes] | list[Scalar]:
    if key in layout.metadata:
        return layout.metadata[key]
    array: GgufArray = layout.arrays[key]
    return [*array.read_bytes()] if array.item_type == "string" else array.read()


def _text(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"
