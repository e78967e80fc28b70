"""LoRA adapters and control vectors: those loaded with a model, and those that a computation
uses."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

MOST_SCALE = 100.0
FORM = f"[NAME=]FILE[:SCALE], with a scale from {-MOST_SCALE:g} to {MOST_SCALE:g}"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that is loaded."""

    name: str
    path: str
    scale: float = 1.0
    """Applied if a request names the adapter, or by default."""
    is_default: bool = False
    """Whether it applies to requests that select no adapters."""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ControlVector:
    """A direction for each layer, which is added to the layer's output."""

    path: str
    scale: float = 1.0


Applied = tuple[tuple[int, float], ...]
"""The adapters of a computation, in order: the index of each among the loaded ones, and its scale,
which is never 0."""


class Scope(NamedTuple):
    """What KV cells depend on besides their tokens; only requests of the same scope share cells."""

    salt: str | None = None
    adapters: Applied = ()


def applied(scales: Mapping[int, float]) -> Applied:
    """Scales rounded to 32-bit floats, as llama.cpp uses them, without those that are 0."""
    rounded = ((n, struct.unpack("f", struct.pack("f", s))[0]) for n, s in sorted(scales.items()))
    return tuple((number, scale) for number, scale in rounded if scale)


def parse_adapter(text: str) -> Adapter:
    """Parse a value of `--lora`.

    A number after the last `:` or `=` is the scale. Text before the first `=` is the name, unless
    it contains a `/`. Without a name, the adapter applies by default, and is named like its file.

    Raises:
        ValueError: it has another form.
    """
    file, scale = _scaled(text, ":=")
    name, is_named, path = file.partition("=")
    if not is_named or "/" in name:
        is_named, path = "", file
        name = file.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
    if not name or not path or not abs(scale) <= MOST_SCALE:
        raise ValueError(f"must be {FORM}, not {text!r}")
    return Adapter(name, path, scale, is_default=not is_named)


def parse_control_vector(text: str) -> ControlVector:
    """Parse a value of `--control-vector`: a file, and its scale after the last `:`.

    Raises:
        ValueError: it has another form.
    """
    path, scale = _scaled(text, ":")
    if not path or not abs(scale) <= MOST_SCALE:
        scales = f"from {-MOST_SCALE:g} to {MOST_SCALE:g}"
        raise ValueError(f"must be FILE[:SCALE], with a scale {scales}, not {text!r}")
    return ControlVector(path, scale)


def with_path(given: Adapter | ControlVector, made: Callable[[str], str]) -> str:
    """The text that parses as this adapter or control vector with `made(path)` as its path."""
    name = f"{given.name}=" if isinstance(given, Adapter) and not given.is_default else ""
    return f"{name}{made(given.path)}:{str(given.scale).removesuffix('.0')}"


def _scaled(text: str, before_scale: str) -> tuple[str, float]:
    """A file, and the number after the last of the characters `before_scale`; 1 without one."""
    at = max(map(text.rfind, before_scale))
    try:
        return text[: max(at, 0)], float(text[at + 1 :] if at >= 0 else "")
    except ValueError:
        return text, 1.0
