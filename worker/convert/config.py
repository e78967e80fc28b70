"""Typed look-ups in `config.json`; a failed look-up names the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from worker.errors import ModelError

MOST = 1e30
"""Numbers of a configuration must be below this: a GGUF stores them as float32."""

_CONTEXT = "max_position_embeddings"
TRAINED = "original_max_position_embeddings"
"""The context length in training, for a rope scaling. As in transformers, the value beside the rope
settings overrides that within them, and the default is the whole context."""


def _of_layers(value: Any) -> Any:
    """The value that a list repeats for every layer; any other value unchanged."""
    is_one = isinstance(value, list) and len(value) > 1 and value.count(value[0]) == len(value)
    return value[0] if is_one else value


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position parameters, from `rope_parameters` or the older keys beside it."""

    theta: float
    kind: str
    """`default`, `linear`, `llama3`, `yarn`, `longrope`…"""
    params: Config


@dataclass(frozen=True, slots=True)
class Config:
    """A JSON object of the checkpoint, and the name that errors give it."""

    values: Mapping[str, Any]
    name: str = "config.json"
    spelled: Mapping[str, str] = field(default_factory=dict)
    """By key, the one that the file has for it, if that is another."""

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def changed(self, **values: object) -> Config:
        """A copy with these values."""
        return replace(self, values={**self.values, **values})

    def renamed(self, keys: Mapping[str, str]) -> Config:
        """A copy with the values of present keys also under others; `keys` has the present one of
        each. Errors name that one."""
        present = {key: own for key, own in keys.items() if self.has(own)}
        values = {key: self.values[own] for key, own in present.items()}
        spelled = {key: self.spelling(own) for key, own in present.items()}
        return Config({**self.values, **values}, self.name, {**self.spelled, **spelled})

    def spelling(self, key: str) -> str:
        return self.spelled.get(key, key)

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The first present of several spellings of one key; its value must be a positive
        integer, or a list that gives the same one to each layer."""
        return int(
            self._checked(
                keys, default, "a positive integer", (int,), lambda n: 1 <= n < 1 << 31, _of_layers
            )
        )

    def number(self, *keys: str, default: float | None = None) -> float:
        return float(
            self._checked(keys, default, "a number", (int, float), lambda n: 0 <= n < MOST)
        )

    def count(self, key: str) -> int:
        """An integer; 0 if the key is absent."""
        return self.integer(key) if self.values.get(key) not in (None, 0) else 0

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self._checked((key,), default, "true or false", (bool,)))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._checked((key,), default, "a string", (str,)))

    def items(self, key: str, default: list[Any] | None = None) -> list[Any]:
        return list(self._checked((key,), default, "a list", (list,)))

    def section(self, key: str) -> Config:
        """A nested object; empty if it is absent or null."""
        values = self._checked((key,), {}, "an object", (dict,))
        return Config(values, f"{self.name}: {key}")

    def _checked(
        self,
        keys: tuple[str, ...],
        default: Any,
        what: str,
        types: tuple[type, ...],
        is_sound: Callable[[Any], bool] = lambda value: True,
        read: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        key = next(filter(self.has, keys), None)
        value = read(default if key is None else self.values[key])
        named = " or ".join(keys) if key is None else self.spelling(key)
        if value is None:
            raise ModelError(f"{self.name} lacks {named}")
        if type(value) not in types or not is_sound(value):
            verb = "must be" if key is not None else "is absent; its default would have to be"
            raise ModelError(f"{self.name}: {named} {verb} {what}, not {value!r:.80}")
        return value

    def rope(self, layers: str = "full_attention", default_theta: float = 10000.0) -> Rope:
        """The rotary parameters; `layers` picks a section if the configuration has several."""
        params, scaling = self.section("rope_parameters"), self.section("rope_scaling")
        if params.has(layers):
            params = params.section(layers)
        elif not params.values:
            params = scaling
        elif any(params.values.get(key) != value for key, value in scaling.values.items()):
            raise ModelError(f"{self.name}: rope_scaling and rope_parameters contradict each other")
        theta = params.number(
            "rope_theta", default=self.number("rope_theta", default=default_theta)
        )
        if not theta or params.values.get("factor") == 0:
            raise ModelError(f"{self.name}: rope_theta and a rope's factor must be above 0")
        kind = params.text("rope_type", params.text("type", "default"))
        places = (self.values, TRAINED), (params.values, TRAINED), (self.values, _CONTEXT)
        trained = next((n for values, key in places if (n := values.get(key)) is not None), None)
        params = params.changed(**{TRAINED: trained})
        return Rope(theta, kind, params)
