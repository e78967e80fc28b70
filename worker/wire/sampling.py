"""How a token is drawn: the one table of samplers and their parameters.

Each numeric parameter of a sampler is a field of `Sampling`, annotated with its `Parameter`. The
API's fields, the flags, the model file's defaults and the settings in answers are derived from it,
so no dialect has a list of its own. Shared by both processes.
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
    """The limits and names of one parameter. Its default in `Sampling` turns its sampler off; if no
    value does, it is llama.cpp's."""

    low: float
    high: float
    """The range of the worker's own protocol."""
    text: str
    usual: float | None = None
    """llama.cpp's default, if it differs from `Sampling`'s."""
    widest: tuple[float, float] | None = None
    """The range of other dialects; a number below `low` stands for the default."""
    nearest_in: tuple[float, float] | None = None
    """The range to which llama-server clamps a number."""
    theirs: str = ""
    """llama-server's name, if it is not `name`."""
    also: tuple[str, ...] = ()
    """Other names that clients use."""
    key: str = ""
    """Its key under `general.sampling.` in a model file."""
    name: str = ""
    """Its field in `Sampling`, from which `_table` also takes the next two."""
    is_integer: bool = False
    default: float | None = None

    @property
    def range(self) -> tuple[float, float]:
        return self.widest or (self.low, self.high)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients use, its own first."""
        return tuple(dict.fromkeys((self.name, self.theirs, *self.also)))

    def nearest(self, given: float) -> float:
        """The number clamped as llama-server does."""
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
"""The most samplers in an order: each costs a pass over the vocabulary for each token."""
DEFAULT_BREAKERS = ("\n", ":", '"', "*")


class Constraint(Struct, frozen=True):
    """A grammar that the answer must follow."""

    grammar: str
    """Lark in llguidance's dialect."""
    field: str
    """The request's field that it comes from, for errors."""
    follows_reasoning: bool = False
    """Whether the constraint applies only after reasoning that the prompt has opened."""


class ReasoningRules(Struct, frozen=True):
    """How a model marks its reasoning, and how much of it an answer may have."""

    begins: tuple[str, ...]
    end: str
    closing: str
    """Text that closes reasoning whose budget is spent: the end mark as the model writes it."""
    anywhere: bool = False
    """Whether reasoning may also begin in the middle of an answer."""
    goes_on: bool = False
    """Whether the prompt ends inside reasoning, which the answer continues."""
    budget: int | None = None
    """Maximum tokens of reasoning in an answer, without `closing`; `None`: no limit."""
    message: str = ""
    """Inserted before `closing`."""


# fmt: off
class Sampling(Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. Ranges are checked before this is built."""

    seed: int
    temperature: Annotated[float, Parameter(0, 2, "0 is greedy", usual=0.8, widest=(0, 1000), key="temp", nearest_in=(0, math.inf))] = 1.0
    top_k: Annotated[int, Parameter(0, _MOST, "how many of the most likely tokens are kept; 0 is off", usual=40, widest=(-_MOST, _MOST), key="top_k")] = 0
    top_p: Annotated[float, Parameter(0, 1, "keeps the most likely tokens whose probabilities add up to this; 1 is off", usual=0.95, key="top_p", nearest_in=(0, 1))] = 1.0
    min_p: Annotated[float, Parameter(0, 1, "keeps tokens with at least this share of the most likely token's probability; 0 is off", usual=0.05, key="min_p", nearest_in=(0, 1))] = 0.0
    typical_p: Annotated[float, Parameter(0, 1, "keeps the tokens whose surprise is closest to the average and whose probabilities add up to this; 1 is off", widest=(0, 1000), also=("typical",))] = 1.0
    top_n_sigma: Annotated[float, Parameter(-1, 1000, "keeps tokens whose logit is at most this many standard deviations below the largest; 0 or less is off", widest=(-1000, 1000), also=("nsigma",))] = -1.0
    xtc_probability: Annotated[float, Parameter(0, 1, "the chance that xtc drops the tokens above xtc_threshold, except the least likely of them; 0 is off", key="xtc_probability", nearest_in=(0, 1))] = 0.0
    xtc_threshold: Annotated[float, Parameter(0, 1, "minimum probability of the tokens that xtc drops; above 0.5 is off", key="xtc_threshold", nearest_in=(0, 1))] = 0.1
    min_keep: Annotated[int, Parameter(0, _MOST, "minimum number of tokens that top_p, min_p, typical_p and xtc keep")] = 0
    dynatemp_range: Annotated[float, Parameter(0, 1000, "how far the temperature falls if the model is certain of the next token, and rises if it is not; 0 is off", widest=(-1000, 1000))] = 0.0
    dynatemp_exponent: Annotated[float, Parameter(0, 1000, "how strongly the model's certainty affects the temperature within dynatemp_range")] = 1.0
    repetition_penalty: Annotated[float, Parameter(0, 2, "makes tokens of the text so far less likely: divides their positive logits, multiplies negative ones; 1 is off", widest=(0, 1000), theirs="repeat_penalty", also=("rep_pen",), key="penalty_repeat")] = 1.0
    frequency_penalty: Annotated[float, Parameter(-2, 2, "subtracted from a token's logit for each earlier occurrence of the token; 0 is off")] = 0.0
    presence_penalty: Annotated[float, Parameter(-2, 2, "subtracted once from the logit of each token that has occurred; 0 is off")] = 0.0
    repeat_last_n: Annotated[int | None, Parameter(-1, _MOST, "how many of the last tokens, the prompt's included, the repetition, frequency and presence penalties count; -1 is all, 0 is none", also=("repetition_penalty_range", "rep_pen_range"), key="penalty_last_n")] = None
    """`None`: the repetition penalty counts prompt and answer, as in transformers and vLLM; the
    other two count the answer only, as at OpenAI."""
    dry_multiplier: Annotated[float, Parameter(0, 1000, "strength of dry, which penalises tokens that continue a repetition; 0 is off", widest=(-1000, 1000))] = 0.0
    dry_base: Annotated[float, Parameter(1, 1000, "growth of dry's penalty: dry_multiplier for the first token beyond dry_allowed_length, this many times as much for each further one", widest=(-1000, 1000))] = 1.75
    dry_allowed_length: Annotated[int, Parameter(0, _MOST, "the longest repetition, in tokens, that is not penalised")] = 2
    dry_penalty_last_n: Annotated[int, Parameter(-1, _MOST, "how many of the last tokens dry searches for repetitions; -1 is all, 0 is none")] = 64
    mirostat: Annotated[int, Parameter(0, 2, "version of mirostat, 1 or 2, which replaces all samplers but the temperature; 0 is off", also=("mirostat_mode",), key="mirostat", nearest_in=(0, 2))] = 0
    mirostat_tau: Annotated[float, Parameter(0, 1000, "the surprise, in bits, that mirostat aims for", key="mirostat_tau")] = 5.0
    mirostat_eta: Annotated[float, Parameter(0, 1000, "how fast mirostat adapts", key="mirostat_eta")] = 0.1
    adaptive_target: Annotated[float, Parameter(-1, 1, "the probability that adaptive_p aims for in the tokens it draws; below 0 is off", widest=(-_MOST, 1), nearest_in=(-math.inf, 1))] = -1.0
    adaptive_decay: Annotated[float, Parameter(0, 0.99, "how long adaptive_p remembers earlier draws")] = 0.9
    # fmt: on
    samplers: tuple[str, ...] = ORDER
    """The samplers in use, in order. `adaptive_p` draws the token, wherever it is in the order."""
    dry_sequence_breakers: tuple[str, ...] = DEFAULT_BREAKERS
    """Texts that end a repetition for DRY."""
    logit_bias: tuple[tuple[int | str, float], ...] = ()
    """What is added to logits: of the token with an id, or of all tokens of a text."""
    is_seeded: bool = False
    """Whether the request gave the seed, and so expects the same text each time."""
    constraint: Constraint | None = None
    reasoning: ReasoningRules | None = None
    """`None` if it is unknown how the model marks reasoning."""
    logprobs: int | None = None
    """Alternatives per token. 0: only the drawn token's log-probability; `None`: none."""
    post_sampling_probs: bool = False
    """Whether log-probabilities are those after sampling, with which the token was drawn."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """The end is not drawn before this many tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer as the model's own end-of-generation tokens do."""

    @property
    def learns(self) -> bool:
        """Whether a draw depends on the probabilities of earlier tokens, not only on their ids."""
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
"""Each parameter by its name, in the order of the fields."""

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
"""Parameters of samplers that llama.cpp lacks, by their names in other programs → the value that
turns them off. Clients send that value by default; any other is refused."""
_ALIASES = {
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
_IGNORED = {*OTHERS, "quadratic_sampling", "no_repeat_ngram", "mirostat"}
"""Names that an order may contain and that are ignored there: each is turned on by a parameter,
which is refused, or replaces the whole chain."""
_SPELLINGS = (
    dict.fromkeys(_IGNORED, "")
    | {name.replace("_", ""): name for name in SAMPLERS}
    | _ALIASES
    | {name: name for name in SAMPLERS}
)


def order_of(given: str | tuple[str, ...]) -> tuple[str, ...]:
    """The samplers that an order names, in the notations of llama.cpp and its clients.

    A text has letters, or names separated by `;`, `,` or line breaks. An alias of a sampler that
    came before is left out.

    Raises:
        ValueError: a name or letter is unknown, or there are too many.
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
            raise ValueError(f"names {name!r}, which is not a sampler here: {known}")
        if sampler and (sampler == plain or sampler not in found):
            found.append(sampler)
    if len(found) > MAX_SAMPLERS:
        raise ValueError(f"names {len(found)} samplers; it may name at most {MAX_SAMPLERS}")
    return tuple(found)


def _by_letter(letter: str) -> str:
    if letter not in LETTERS:
        known = ", ".join(f"{each} {name}" for each, name in LETTERS.items())
        raise ValueError(f"names {letter!r}, which is not a sampler's letter here: {known}")
    return LETTERS[letter]
