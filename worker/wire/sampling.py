"""How a token is drawn: the one table of samplers and their parameters.

Each number that a sampler has is a field of `Sampling`, annotated with its `Parameter`. The API's
fields, the defaults by flag and by the model's file, and the answers' settings are read off it, so
no dialect has a list of its own. Shared by both processes.
"""

# ruff: noqa: E501 - the parameters are a table, one a line
from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, get_args, get_origin, get_type_hints

from msgspec import Struct
from msgspec.structs import fields

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Parameter:
    """What one number may be. Its default in `Sampling` is "off", or llama.cpp's if nothing is."""

    low: float
    high: float
    """The range of the worker's own protocol."""
    text: str
    usual: float | None = None
    """llama.cpp's default, if that is not `Sampling`'s."""
    widest: tuple[float, float] | None = None
    """The range that other dialects take; below `low`, a number stands for the default."""
    nearest_in: tuple[float, float] | None = None
    """llama-server takes a number beyond this range as the nearest one in it."""
    theirs: str = ""
    """llama-server's name; left out where it is `name`."""
    also: tuple[str, ...] = ()
    """What else clients call it."""
    key: str = ""
    """In `general.sampling.*` of a model's file."""
    name: str = ""
    """Its field in `Sampling`, which has what follows, too."""
    is_integer: bool = False
    default: float | None = None

    @property
    def range(self) -> tuple[float, float]:
        return self.widest or (self.low, self.high)

    @property
    def names(self) -> tuple[str, ...]:
        """All that clients call it, its own name first."""
        return tuple(dict.fromkeys((self.name, self.theirs, *self.also)))

    def nearest(self, given: float) -> float:
        """The number that llama-server takes a given one for."""
        if self.nearest_in is None:
            return given
        low, high = self.nearest_in
        return low if given < low else min(given, high)


ORDER = tuple("penalties dry top_n_sigma top_k typ_p top_p min_p xtc temperature".split())
"""llama.cpp's samplers, in its own order."""
LETTERS = dict(zip("edskypmxt", ORDER, strict=True)) | {"i": "infill", "a": "adaptive_p"}
"""The letters of llama.cpp's `--sampling-seq`."""
SAMPLERS = tuple(LETTERS.values())
MAX_SAMPLERS = 64
"""Of one order: each is a pass over the vocabulary for each token."""
DEFAULT_BREAKERS = ("\n", ":", '"', "*")


class Constraint(Struct, frozen=True):
    """A grammar that the answer must follow."""

    grammar: str
    """Lark in llguidance's dialect."""
    field: str
    """The request's field that it comes from, for errors."""
    follows_reasoning: bool = False
    """Whether the constraint begins behind reasoning that the prompt has opened."""


class ReasoningRules(Struct, frozen=True):
    """How a model marks its reasoning, and how much of it an answer may have."""

    begins: tuple[str, ...]
    end: str
    closing: str
    """What closes a block whose budget is spent: the end mark, as the model writes it."""
    anywhere: bool = False
    """Whether reasoning may begin in the middle of an answer too."""
    goes_on: bool = False
    """Whether the prompt ends within reasoning, which the answer continues."""
    budget: int | None = None
    """Tokens of reasoning in an answer; `None`: any number. The closing is not counted."""
    message: str = ""
    """Stands before the closing."""


# fmt: off
class Sampling(Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. Ranges are checked before this is built."""

    seed: int
    temperature: Annotated[float, Parameter(0, 2, "0 is greedy", usual=0.8, widest=(0, 1000), key="temp", nearest_in=(0, math.inf))] = 1.0
    top_k: Annotated[int, Parameter(0, _MOST, "how many of the likeliest tokens are kept; 0 is off", usual=40, widest=(-_MOST, _MOST), key="top_k")] = 0
    top_p: Annotated[float, Parameter(0, 1, "the likeliest tokens that have this probability together are kept; 1 is off", usual=0.95, key="top_p", nearest_in=(0, 1))] = 1.0
    min_p: Annotated[float, Parameter(0, 1, "tokens are kept that have this share of the likeliest one's probability; 0 is off", usual=0.05, key="min_p", nearest_in=(0, 1))] = 0.0
    typical_p: Annotated[float, Parameter(0, 1, "the tokens of the most typical surprise that have this probability together are kept; 1 is off", widest=(0, 1000), also=("typical",))] = 1.0
    top_n_sigma: Annotated[float, Parameter(-1, 1000, "tokens are kept whose logit is at most this many standard deviations below the largest; 0 and -1 are off", widest=(-1000, 1000), also=("nsigma",))] = -1.0
    xtc_probability: Annotated[float, Parameter(0, 1, "the chance that all but the least likely of the tokens above xtc_threshold are dropped; 0 is off", key="xtc_probability", nearest_in=(0, 1))] = 0.0
    xtc_threshold: Annotated[float, Parameter(0, 1, "the least probability of tokens that xtc drops; above 0.5 is off", key="xtc_threshold", nearest_in=(0, 1))] = 0.1
    min_keep: Annotated[int, Parameter(0, _MOST, "how many tokens top_p, min_p, typical_p and xtc keep at least")] = 0
    dynatemp_range: Annotated[float, Parameter(0, 1000, "how much lower the temperature is where the model is sure, and how much higher where it is not; 0 is off", widest=(-1000, 1000))] = 0.0
    dynatemp_exponent: Annotated[float, Parameter(0, 1000, "how strongly the model's sureness counts for dynatemp_range")] = 1.0
    repetition_penalty: Annotated[float, Parameter(0, 2, "how much less likely tokens of the text so far become; 1 is off", widest=(0, 1000), theirs="repeat_penalty", also=("rep_pen",), key="penalty_repeat")] = 1.0
    frequency_penalty: Annotated[float, Parameter(-2, 2, "taken from a token's logit each time that it was said; 0 is off")] = 0.0
    presence_penalty: Annotated[float, Parameter(-2, 2, "taken from a token's logit if it was said; 0 is off")] = 0.0
    repeat_last_n: Annotated[int | None, Parameter(-1, _MOST, "how many of the last tokens the three penalties count, the prompt's too; -1 is all of them, 0 none", also=("repetition_penalty_range", "rep_pen_range"), key="penalty_last_n")] = None
    """`None`: the repetition penalty counts prompt and answer, as in transformers and vLLM; the
    other two count the answer only, as at OpenAI."""
    dry_multiplier: Annotated[float, Parameter(0, 1000, "how much less likely a token becomes that continues a repetition; 0 is off", widest=(-1000, 1000))] = 0.0
    dry_base: Annotated[float, Parameter(1, 1000, "the first token beyond dry_allowed_length loses dry_multiplier of its logit, and each further one this many times as much", widest=(-1000, 1000))] = 1.75
    dry_allowed_length: Annotated[int, Parameter(0, _MOST, "the longest repetition, in tokens, that is not punished")] = 2
    dry_penalty_last_n: Annotated[int, Parameter(-1, _MOST, "how many of the last tokens dry searches for repetitions; -1 is all of them, 0 none")] = 64
    mirostat: Annotated[int, Parameter(0, 2, "1 and 2 are versions of mirostat, which takes the place of all samplers but the temperature; 0 is off", also=("mirostat_mode",), key="mirostat", nearest_in=(0, 2))] = 0
    mirostat_tau: Annotated[float, Parameter(0, 1000, "the surprise, in bits, that mirostat aims at", key="mirostat_tau")] = 5.0
    mirostat_eta: Annotated[float, Parameter(0, 1000, "how fast mirostat adapts", key="mirostat_eta")] = 0.1
    adaptive_target: Annotated[float, Parameter(-1, 1, "the probability of the tokens that adaptive_p draws; -1 is off", widest=(-_MOST, 1), nearest_in=(-math.inf, 1))] = -1.0
    adaptive_decay: Annotated[float, Parameter(0, 0.99, "how long adaptive_p remembers what was drawn")] = 0.9
    # fmt: on
    samplers: tuple[str, ...] = ORDER
    """Those that are used, in their order. `adaptive_p`, wherever it stands, draws the token."""
    dry_sequence_breakers: tuple[str, ...] = DEFAULT_BREAKERS
    """Texts that no repetition goes across."""
    logit_bias: tuple[tuple[int | str, float], ...] = ()
    """What is added to the logits of tokens: one by its id, or all that a text consists of."""
    is_seeded: bool = False
    """Whether the seed was given, so that it shall bring the same text again."""
    constraint: Constraint | None = None
    reasoning: ReasoningRules | None = None
    """`None` if nothing is known of the model's reasoning."""
    logprobs: int | None = None
    """Alternatives per token; 0 has only the drawn token's, `None` no log-probabilities."""
    post_sampling_probs: bool = False
    """Whether log-probabilities are those that the token was drawn with."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """No end is drawn before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer as the model's own end does."""

    @property
    def learns(self) -> bool:
        """Whether a draw depends on how likely the tokens before were, which their ids do not
        tell."""
        if self.mirostat:
            return True
        return self.adaptive_target >= 0 and "adaptive_p" in self.samplers


def _table() -> dict[str, Parameter]:
    hints = get_type_hints(Sampling, include_extras=True)
    found = {}
    for each in fields(Sampling):
        if get_origin(hint := hints[each.name]) is Annotated:
            kind, written = get_args(hint)
            found[each.name] = replace(
                written,
                theirs=written.theirs or each.name,
                name=each.name,
                is_integer=kind is int or int in get_args(kind),
                default=each.default,
            )
    return found


PARAMETERS: Mapping[str, Parameter] = _table()
"""Name → what it may be, in the order of the fields."""

OTHERS: Mapping[str, float] = {
    "tfs_z": 1,
    "tfs": 1,
    "top_a": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "smoothing_factor": 0,
    "skew": 0,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "penalty_alpha": 0,
    "guidance_scale": 1,
    "num_beams": 1,
}
"""Parameters of samplers that llama.cpp does not have, by their names in other programs → the value
that is off, which clients send unasked. Any other value is refused."""
_SAME = {
    "nucleus": "top_p",
    "temp": "temperature",
    "typ": "typ_p",
    "typical_p": "typ_p",
    "typical": "typ_p",
    "repetition_penalty": "penalties",
    "presence_penalty": "penalties",
    "frequency_penalty": "penalties",
    "dynamic_temperature": "temperature",
}
_ELSEWHERE = {*OTHERS, "quadratic_sampling", "no_repeat_ngram", "mirostat"}
"""Names in an order that say nothing: a parameter turns each of them on, and is refused or takes
the place of the whole chain."""
_SPELLINGS = (
    dict.fromkeys(_ELSEWHERE, "")
    | {name.replace("_", ""): name for name in SAMPLERS}
    | _SAME
    | {name: name for name in SAMPLERS}
)


def order_of(given: str | tuple[str, ...]) -> tuple[str, ...]:
    """The samplers that an order names, in the forms of llama.cpp and of what sends to it.

    A text has letters, or names between `;`, `,` or line breaks. A name that stands for a sampler
    which came before is left out.

    Raises:
        ValueError: a name or letter is no sampler's, and the message says which; or they are too
            many.
    """
    if isinstance(given, str):
        if given.isalpha() and (set(given) <= LETTERS.keys() or given.lower() not in _SPELLINGS):
            given = tuple(map(_by_letter, given))
        else:
            given = tuple(re.split("[;,\n]", given))
    found: list[str] = []
    for name in filter(None, map(str.strip, given)):
        plain = name.lower().replace("-", "_")
        sampler = _SPELLINGS.get(plain)
        if sampler is None:
            known = ", ".join(sorted(SAMPLERS))
            raise ValueError(f"names {name!r}, which is no sampler here: {known}")
        if sampler and (sampler == plain or sampler not in found):
            found.append(sampler)
    if len(found) > MAX_SAMPLERS:
        raise ValueError(f"names {len(found)} samplers; it may name {MAX_SAMPLERS}")
    return tuple(found)


def _by_letter(letter: str) -> str:
    if letter not in LETTERS:
        known = ", ".join(f"{each} {name}" for each, name in LETTERS.items())
        raise ValueError(f"names {letter!r}, which is no sampler's letter here: {known}")
    return LETTERS[letter]
