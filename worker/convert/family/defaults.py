"""What a key means that `config.json` leaves out or calls otherwise: what the model's class says.

`classes.json` has, by `model_type`, the defaults of transformers' classes for the keys that the
converter reads, and the names that they take in place of a key
(`tools/reference/make_config_defaults.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

import msgspec

from worker.convert.config import Config
from worker.errors import ModelError

UNSETTLED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("cohere", "minimax_m2", "olmo3", "qwen3_vl", "qwen3_vl_moe"), "rope_theta"),
    **dict.fromkeys(("gpt_oss", "ministral3", "mistral4"), "rope_type"),
}
"""A key that must be there. Releases of transformers, or a model's own code, have different
defaults, or the default is a whole scaling of the rotation."""
_LIKE = {"kimi_k2": "deepseek_v3"}
"""Types of models whose class is another one's."""


class _Class(msgspec.Struct):
    defaults: dict[str, Any] = {}
    names: dict[str, str] = {}
    """The key that each further name stands for."""
    nullable: list[str] = []
    """Where `null` is no absence: there is no window, or the heads are as many as usual."""


@cache
def _classes() -> Mapping[str, _Class]:
    data = (files(__package__) / "classes.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, _Class])


def completed(config: Config) -> Config:
    """With the defaults of the configuration's class in the places of keys that are absent.

    Raises:
        ModelError: a key and another name of it have different values.
    """
    kind = _kind(config)
    said = _classes().get(_LIKE.get(kind, kind), _Class())
    there = {k: v for k, v in config.values.items() if v is not None or k in said.nullable}
    named: dict[str, Any] = {}
    for name, key in said.names.items():
        if name in there and there.get(key, there[name]) != there[name]:
            both = f"{key} {there[key]!r:.80} and {name} {there[name]!r:.80}"
            raise ModelError(f"{config.name} has {both}, which are names of one setting")
        if name in there:
            named[key] = there[name]
    return Config({**said.defaults, **named, **there}, config.name)


def check_settled(config: Config) -> None:
    """
    Raises:
        ModelError: a key is absent whose default is not settled.
    """
    key = UNSETTLED.get(_kind(config))
    if key and key not in set(_keys(config)):
        raise ModelError(f"{config.name} lacks {key}")


def _kind(config: Config) -> str:
    """The type of the model; a part of a multimodal one may have `_text` behind it."""
    return config.text("model_type", "").removesuffix("_text")


def _keys(config: Config) -> Iterator[str]:
    """The keys that are there, also those of the rotation, which may be one or two levels deeper
    and have an older name for its type."""
    yield from config.values
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.section(name).values
        for params in (rope, *(each for each in rope.values() if isinstance(each, dict))):
            yield from ("rope_type" if key == "type" else key for key in params)
