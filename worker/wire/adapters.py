"""LoRA adapters and control vectors: those that are loaded beside a model, and those that a
computation has."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

MOST_SCALE = 100.0
FORM = f"[NAME=]FILE[:SCALE], with a scale from {-MOST_SCALE:g} to {MOST_SCALE:g}"


@dataclass(frozen=True, slots=True)
class Adapter:
    """One that is loaded."""

    name: str
    path: str
    scale: float = 1.0
    """Where a request names it."""
    is_default: bool = False
    """Whether requests that say nothing of adapters have it."""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ControlVector:
    """A direction for each layer, which is added to what the layer puts out."""

    path: str
    scale: float = 1.0


Applied = tuple[tuple[int, float], ...]
"""The adapters of a computation: the number of each among those that are loaded, in their order,
and its scale. None has the scale 0."""


class Scope(NamedTuple):
    """What cells depend on beside their tokens: only requests of the same scope share them."""

    salt: str | None = None
    adapters: Applied = ()


def applied(scales: Mapping[int, float]) -> Applied:
    """Scales as llama.cpp takes them, which are 32-bit floats."""
    rounded = ((n, struct.unpack("f", struct.pack("f", s))[0]) for n, s in sorted(scales.items()))
    return tuple((number, scale) for number, scale in rounded if scale)


def parse_adapter(text: str) -> Adapter:
    """Parse a value of `--lora`.

    A number behind the last `:` or `=` is the scale. What is before the first `=` is the name,
    unless it has a `/`. Without a name, the adapter is applied by default, and is called as its
    file.

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
    """Parse a value of `--control-vector`: a file and behind the last `:` its scale.

    Raises:
        ValueError: it has another form.
    """
    path, scale = _scaled(text, ":")
    if not path or not abs(scale) <= MOST_SCALE:
        scales = f"from {-MOST_SCALE:g} to {MOST_SCALE:g}"
        raise ValueError(f"must be FILE[:SCALE], with a scale {scales}, not {text!r}")
    return ControlVector(path, scale)


def with_path(given: Adapter | ControlVector, made: Callable[[str], str]) -> str:
    """What is parsed as this adapter or control vector, with another path."""
    name = f"{given.name}=" if isinstance(given, Adapter) and not given.is_default else ""
    return f"{name}{made(given.path)}:{str(given.scale).removesuffix('.0')}"


def _scaled(text: str, before_scale: str) -> tuple[str, float]:
    """A file, and the number behind the last of these characters; 1 without one."""
    at = max(map(text.rfind, before_scale))
    try:
        return text[: max(at, 0)], float(text[at + 1 :] if at >= 0 else "")
    except ValueError:
        return text, 1.0
