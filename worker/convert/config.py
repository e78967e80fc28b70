"""Typed look-ups in `config.json`; a failed look-up names the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.errors import ModelError

MOST = 1e30
"""No setting of a model is beyond; a float32 is its place in the file."""


def _text(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position parameters, from `rope_parameters` or the older `rope_theta` keys."""

    theta: float
    kind: str
    """`default`, `linear`, `llama3`, `yarn`, `longrope`…"""
    params: Config


@dataclass(frozen=True, slots=True)
class Config:
    """A JSON object of the checkpoint, and the name that errors give it."""

    values: Mapping[str, Any]
    name: str = "config.json"

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The first present of several spellings of one key; its value must be a positive
        integer."""
        value = self._first(keys, default)
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise ModelError(
                f"{self.name}: {keys[0]} must be a positive integer, not {_text(value)}"
            )
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        value = self._first(keys, default)
        if type(value) not in (int, float) or not abs(value) < MOST:
            raise ModelError(f"{self.name}: {keys[0]} must be a number, not {_text(value)}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._first((key,), default)
        if type(value) is not bool:
            raise ModelError(f"{self.name}: {key} must be true or false, not {_text(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._first((key,), default)
        if not isinstance(value, str):
            raise ModelError(f"{self.name}: {key} must be a string, not {_text(value)}")
        return value

    def items(self, key: str) -> list[Any]:
        value = self._first((key,), None)
        if not isinstance(value, list):
            raise ModelError(f"{self.name}: {key} must be a list, not {_text(value)}")
        return value

    def section(self, key: str) -> Config:
        """A nested object; empty if it is absent or null."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise ModelError(f"{self.name}: {key} must be an object, not {_text(value)}")
        return Config(value, f"{self.name}: {key}")

    def _first(self, keys: tuple[str, ...], default: Any) -> Any:
        for key in keys:
            if self.values.get(key) is not None:
                return self.values[key]
        if default is None:
            raise ModelError(f"{self.name} lacks {keys[0]}")
        return default

    def rope(self, layers: str = "full_attention", default_theta: float = 10000.0) -> Rope:
        """The rotary parameters; `layers` picks a section where the configuration has several."""
        params = self.section("rope_parameters")
        if params.has(layers):
            params = params.section(layers)
        elif not params.values:
            params = self.section("rope_scaling")
        theta = params.number(
            "rope_theta", default=self.number("rope_theta", default=default_theta)
        )
        kind = params.text("rope_type", params.text("type", "default"))
        return Rope(theta, kind, params)
