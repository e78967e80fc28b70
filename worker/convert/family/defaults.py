"""Fills in the keys that `config.json` omits or calls by an alias, as the model's class would.

`classes.json` has, by `model_type`, the defaults of transformers' classes for the keys that the
converter reads, and the aliases of these keys (`tools/reference/make_config_defaults.py`).
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
"""By `model_type`, a key that must be present: its default differs between releases of transformers
or from the model's own code, or is a whole rope scaling."""
_SAME_CLASS = {"kimi_k2": "deepseek_v3"}
"""Model types that have the class of another type."""


class _Class(msgspec.Struct):
    defaults: dict[str, Any] = {}
    names: dict[str, str] = {}
    """The key that each alias stands for."""
    nullable: list[str] = []
    """Keys whose `null` is a value of its own, such as "no window", and does not mean absence."""


@cache
def _classes() -> Mapping[str, _Class]:
    data = (files(__package__) / "classes.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, _Class])


def completed(config: Config) -> Config:
    """The configuration with its class's defaults for absent keys, and with aliases resolved.

    Raises:
        ModelError: a key and its alias have different values.
    """
    kind = _kind(config)
    known = _classes().get(_SAME_CLASS.get(kind, kind), _Class())
    present = {k: v for k, v in config.values.items() if v is not None or k in known.nullable}
    for name, key in known.names.items():
        if name in present and present.get(key, present[name]) != present[name]:
            both = f"{key} {present[key]!r:.80} and {name} {present[name]!r:.80}"
            raise ModelError(f"{config.name} has {both}, which are names of one setting")
    aliases = {key: name for name, key in known.names.items() if key not in present}
    return Config({**known.defaults, **present}, config.name).renamed(aliases)


def check_settled(config: Config) -> None:
    """Raise `ModelError` if a key of `UNSETTLED` is absent."""
    key = UNSETTLED.get(_kind(config))
    if key and key not in set(_keys(config)):
        raise ModelError(f"{config.name} lacks {key}")


def _kind(config: Config) -> str:
    """`model_type` without the suffix `_text`, which the text part of a multimodal model has."""
    return config.text("model_type", "").removesuffix("_text")


def _keys(config: Config) -> Iterator[str]:
    """The keys that are present, including those of the rope settings, which may be one or two
    levels deeper and may call `rope_type` by its older name `type`."""
    yield from config.values
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.section(name).values
        for params in (rope, *(each for each in rope.values() if isinstance(each, dict))):
            yield from ("rope_type" if key == "type" else key for key in params)
