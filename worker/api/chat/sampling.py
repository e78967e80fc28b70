"""The sampling fields of all dialects but the native one, which has the contract's defaults.

The table in `wire.sampling` defines the numeric fields. An absent one has the value of its flag,
else of the model's file, else llama.cpp's default. Pure functions, any thread.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AliasChoices, BeforeValidator, Field, create_model

from worker.api.http.body import Flag, Integer, Many, Number, OpenBody, Refused, parse_json
from worker.api.http.faults import is_number, wrong
from worker.api.http.state import AppState
from worker.errors import InvalidRequest
from worker.wire.sampling import DEFAULT_BREAKERS, OTHERS, PARAMETERS, Sampling, order_of

MAX_SEED = 2**64 - 1
DRAWN_SEED = 2**32 - 1
"""llama.cpp's value for a seed that it draws (`LLAMA_DEFAULT_SEED`), in requests and answers."""
MAX_BIASES = 1024
MAX_BIAS_CHARS = 16 * 1024
"""The most characters of all texts in `logit_bias`, each of which is tokenised."""
MAX_BIAS = 100
MAX_LLAMA_CPP_BIAS = 10**6
MAX_BREAKERS = 32
MAX_TOKEN_ID = 2**31 - 1
_DIGITS = re.compile(r"[0-9]{1,11}")
LLAMA_CPP_WINDOW = 64
"""llama.cpp's default of `repeat_last_n`."""


def is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID


def _order(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(each, str) for each in texts):
        raise wrong("type", "must be a list of samplers' names, or a string of their letters")
    try:
        return order_of(value if isinstance(value, str) else tuple(value))
    except ValueError as error:
        raise wrong("unknown", str(error)) from None


def _texts(value: Any) -> Any:
    """A list of texts. Some clients send it as JSON text, others only its items as JSON."""
    if isinstance(value, str):
        written = value if value.lstrip().startswith("[") else f"[{value}]"
        with suppress(InvalidRequest):
            value = parse_json(written.encode())
    return [each for each in value if each != ""] if isinstance(value, list) else value


def _biases(value: Any, most: int = MAX_BIAS) -> tuple[tuple[int | str, float], ...]:
    """Biases, from an object of numbers by token or from a list of pairs. A text means all of its
    tokens.

    In an object, whose names are texts, digits are a token id; in a pair they are a text, as in
    llama-server.
    """
    pairs = value
    if isinstance(value, Mapping):
        pairs = [(int(key) if _DIGITS.fullmatch(key) else key, it) for key, it in value.items()]
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise wrong("type", "must be an object of numbers by token, or a list of [token, number]")
    found = [_bias(pair, most) for pair in pairs]
    if len(found) > MAX_BIASES:
        raise wrong("type", f"must have at most {MAX_BIASES} biases")
    if sum(len(token) for token, _ in found if isinstance(token, str)) > MAX_BIAS_CHARS:
        raise wrong("type", f"must have texts of at most {MAX_BIAS_CHARS} characters in all")
    return tuple(found)


def _bias(pair: Any, most: int) -> tuple[int | str, float]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise wrong("type", "must be an object of numbers by token, or a list of [token, number]")
    token, added = pair
    if not isinstance(token, str) and not is_token_id(token):
        raise wrong("type", "must name tokens by ids or texts")
    if added is False:
        return token, -math.inf
    if not is_number(added) or abs(added) > most:
        raise wrong("type", f"must be numbers from -{most} to {most}; false forbids a token")
    return token, added


def _banned(value: Any) -> Any:
    """Token ids: a list, or a text with commas between them."""
    if not isinstance(value, str):
        return value
    texts = filter(None, map(str.strip, value.split(",")))
    return [int(text) if _DIGITS.fullmatch(text) else text for text in texts]


_OTHERS: dict[str, Any] = {
    **OTHERS,
    "banned_strings": [],
    "bad_words": [],
    "allowed_token_ids": [],
    "use_beam_search": False,
    "include_stop_str_in_output": False,
    "repetition_detection": {},
    "watermarking": False,
    "logits_processors": [],
}
"""How other servers choose or end the text of an answer → the value that turns it off."""


Order = Annotated[Many[str], BeforeValidator(_order, list[str] | str)]
Texts = Annotated[
    Many[str], Field(max_length=MAX_BREAKERS), BeforeValidator(_texts, list[str] | str)
]
_Pairs = Many[tuple[Any, Any]]
Biases = Annotated[_Pairs, BeforeValidator(_biases, dict[str, Any] | list[list[Any]])]
LlamaCppBiases = Annotated[
    _Pairs,
    BeforeValidator(partial(_biases, most=MAX_LLAMA_CPP_BIAS), dict[str, Any] | list[list[Any]]),
]
"""llama-server has no limit. Up to this one, a float32 still resolves the logit beneath."""
TokenId = Annotated[int, Field(strict=True, ge=0, le=MAX_TOKEN_ID)]
Banned = Annotated[
    Many[TokenId], Field(max_length=MAX_BIASES), BeforeValidator(_banned, str | list[int])
]


def number_fields(*, is_open: bool) -> dict[str, Any]:
    """The pydantic fields of all parameters. Open ones accept the ranges and names that clients
    use, and may be absent."""
    found: dict[str, Any] = {}
    for name, known in PARAMETERS.items():
        default = None if is_open else known.default
        low, high = known.range if is_open else (known.low, known.high)
        kind: Any = Integer if known.is_integer else Number
        names = AliasChoices(*known.names) if is_open else None
        limits = Field(default, ge=low, le=high, validation_alias=names, description=known.text)
        found[name] = (kind | None if default is None else kind, limits)
    return found


if TYPE_CHECKING:
    _Numbers = OpenBody
else:
    _Numbers = create_model(
        "_Numbers",
        __base__=OpenBody,
        **number_fields(is_open=True),
        **{
            name: (Annotated[Any, Refused("leave it out", off)], None)
            for name, off in _OTHERS.items()
        },
    )


class SamplingFields(_Numbers):
    """How tokens are drawn; an absent field has the model's default."""

    samplers: Order = Field(
        (), description="the samplers to use, in order: their names, or llama.cpp's letters"
    )
    sampler_priority: Order = Field(
        (), description="the samplers that come first, in this order; the others follow"
    )
    temperature_last: Flag = Field(False, description="apply the temperature last")
    dynamic_temperature: Flag = Field(
        False,
        description="temperature from dynatemp_low, if the model is certain, to dynatemp_high",
    )
    dynatemp_low: Number | None = Field(None, ge=0, le=1000)
    dynatemp_high: Number | None = Field(None, ge=0, le=1000)
    do_sample: Flag = Field(True, description="false: the temperature is 0")
    dry_sequence_breakers: Texts = Field(
        DEFAULT_BREAKERS, description="texts that end a repetition for dry"
    )
    logit_bias: Biases = Field(
        (),
        description="numbers to add to logits, as an object or a list of pairs: for a token id, or "
        "for all tokens of a text; false forbids them",
    )
    custom_token_bans: Banned = Field((), description="ids of tokens that are never drawn")
    seed: Integer | None = Field(
        None,
        ge=-(2**63),
        le=2**64 - 1,
        validation_alias=AliasChoices("seed", "sampler_seed"),
        description="random if absent, -1, or llama.cpp's 4294967295",
    )
    ignore_eos: Flag = Field(False, validation_alias=AliasChoices("ignore_eos", "ban_eos_token"))
    min_tokens: Integer = Field(
        0,
        ge=0,
        le=2**31 - 1,
        validation_alias=AliasChoices("min_tokens", "min_length"),
        description="before this many tokens, neither the model nor a stop ends the answer",
    )
    stop_token_ids: Many[TokenId] = Field(
        (), max_length=128, description="ids of further tokens that end the answer"
    )

    counted_tokens: ClassVar[int | None] = None
    """The default of `repeat_last_n` in this dialect."""

    def sampling(self, state: AppState, logprobs: int | None = None) -> Sampling:
        """What these fields ask for, with `Sampling.logprobs` as given. A seed is drawn if it is
        absent, -1 or `DRAWN_SEED`."""
        found: dict[str, Any] = {"repeat_last_n": self.counted_tokens, **state.served.sampling}
        for name in self.model_fields_set & PARAMETERS.keys():
            known, value = PARAMETERS[name], getattr(self, name)
            is_off = known.widest is not None and value < known.low
            found[name] = known.default if is_off else value
        found["top_k"] = min(found["top_k"], state.served.vocab_size)
        if not self.do_sample:
            found["temperature"] = 0.0
        elif self.dynamic_temperature and self.dynatemp_low is not None:
            low, high = self.dynatemp_low, self.dynatemp_high
            high = low if high is None else high
            found |= {"temperature": (low + high) / 2, "dynatemp_range": abs(high - low) / 2}
        order, first = found["samplers"], self.sampler_priority
        if "samplers" in self.model_fields_set:
            order = self.samplers
        elif first:
            order = (*first, *(name for name in order if name not in first))
        if self.temperature_last and "temperature" in order:
            order = (*(name for name in order if name != "temperature"), "temperature")
        found["samplers"] = order
        drawn = self.seed in (None, -1, DRAWN_SEED)
        return Sampling(
            seed=secrets.randbits(64) if drawn else (self.seed or 0) & MAX_SEED,
            is_seeded=not drawn,
            dry_sequence_breakers=self.dry_sequence_breakers,
            logit_bias=self.logit_bias + tuple((id, -math.inf) for id in self.custom_token_bans),
            logprobs=logprobs,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            **found,
        )
