r"""Finds llama.cpp's name for the pre-tokenizer that a `tokenizer.json` defines.

llama.cpp knows them by name, `tokenizer.json` by definition, as steps that split text further and
further. Both are brought to one canonical form here, a tuple of step strings, and compared.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from worker.errors import ConfigError, ModelError
from worker.expectations import closest

Steps = tuple[str, ...]

GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The expression that ByteLevel splits by."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_NO_HAN = tuple(p.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]") for p in _MARKED)
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    name: str
    """The value of `tokenizer.ggml.pre`."""
    steps: Steps
    ignore_merges: bool = False
    """A word that is a token is taken whole, without its merges."""
    is_exact: bool = True
    """Whether llama.cpp splits every text as the definition does; otherwise only ASCII texts."""


def split(pattern: str) -> str:
    return f"split {pattern}"


DIGITS = "digits one by one"
DIGIT_RUNS = "digits in runs"
PUNCTUATION_RUNS = "punctuation in runs"
_GPT2 = split(GPT2_REGEX)
_LLAMA3 = split(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}")
_QWEN2 = split(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_TAIL}")

KNOWN: tuple[PreTokenizer, ...] = (
    PreTokenizer("gpt-2", (_GPT2,)),
    PreTokenizer("llama-bpe", (_LLAMA3,), ignore_merges=True),
    PreTokenizer("dbrx", (_LLAMA3,)),
    PreTokenizer("qwen2", (_QWEN2,)),
    PreTokenizer(
        "qwen35",
        (
            split(
                rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        ),
    ),
    PreTokenizer("smollm", (DIGITS, _GPT2)),
    PreTokenizer("falcon", (PUNCTUATION_RUNS, _GPT2, DIGIT_RUNS, split("[0-9][0-9][0-9]"))),
    PreTokenizer(
        "deepseek-coder",
        (
            split(r"[\r\n]"),
            split(r"\s?\p{L}+"),
            split(r"\s?\p{P}+"),
            split("[一-龥ࠀ-一가-퟿]+"),
            DIGITS,
        ),
        is_exact=False,
    ),
    PreTokenizer(
        "deepseek-v3",
        (
            split(r"\p{N}{1,3}"),
            split("[一-龥぀-ゟ゠-ヿ]+"),
            split(
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
                r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        ),
    ),
    PreTokenizer(
        "tekken",
        (split(rf"{_MARKED[0]}|{_MARKED[1]}|\p{{N}}|{_SLASH_TAIL}"),),
        ignore_merges=True,
        is_exact=False,
    ),
    PreTokenizer(
        "gpt-4o",
        (
            split(
                rf"{_MARKED[0]}{_CONTRACTIONS}?|{_MARKED[1]}{_CONTRACTIONS}?"
                rf"|\p{{N}}{{1,3}}|{_SLASH_TAIL}"
            ),
        ),
        is_exact=False,
    ),
    PreTokenizer(
        "kimi-k2",
        (
            split(
                rf"[\p{{Han}}]+|{_NO_HAN[0]}{_CONTRACTIONS}?|{_NO_HAN[1]}{_CONTRACTIONS}?"
                rf"|\p{{N}}{{1,3}}|{_TAIL}"
            ),
        ),
        ignore_merges=True,
        is_exact=False,
    ),
)


UNKNOWN = "unknown pre-tokenizer type"
"""What llama.cpp says of another name than its own."""


def split_of(name: str, *, ignore_merges: bool = False) -> list[str]:
    """The expressions that split a text as the definition does, applied in order; empty if
    llama.cpp's own pre-tokenizer already does, and takes words whole where `ignore_merges` asks.

    A word cannot be a space and a number, which llama.cpp takes apart in all that it is given."""
    for known in KNOWN:
        suffices = known.is_exact and known.ignore_merges >= ignore_merges
        if (
            known.name == name
            and not suffices
            and (_GPT2 not in known.steps or DIGITS in known.steps)
        ):
            return [r"\p{N}" if s == DIGITS else s.removeprefix(split("")) for s in known.steps]
    return []


def merges_words(name: str) -> bool:
    """Whether this is known of llama.cpp's pre-tokenizer: a word that is a token is not taken whole
    by it."""
    return any(known.name == name and not known.ignore_merges for known in KNOWN)


def recognise(tokenizer: Mapping[str, Any]) -> str:
    """llama.cpp's name for the pre-tokenizer of a `tokenizer.json`.

    Raises:
        ModelError: no known pre-tokenizer has this definition; the message names the nearest.
    """
    found = steps_of(tokenizer.get("pre_tokenizer"))
    steps = tuple(canonical for step in found for canonical in _canonical(step))
    ignore_merges = bool(tokenizer["model"].get("ignore_merges", False))
    same = [k for k in KNOWN if k.steps == steps]
    if same:
        return next((k.name for k in same if k.ignore_merges == ignore_merges), same[0].name)
    text = "; ".join(steps) or "no pre-tokenizer"
    nearest = max(
        KNOWN, key=lambda k: difflib.SequenceMatcher(None, text, "; ".join(k.steps)).ratio()
    )
    raise ModelError(
        f"tokenizer.json: the pre-tokenizer ({text}) is none that llama.cpp is known to have; "
        f"the nearest is {nearest.name} ({'; '.join(nearest.steps)}), "
        "which --pre-tokenizer would choose",
        pre_tokenizer=text,
        nearest=nearest.name,
    )


def unknown(name: str) -> ConfigError:
    """What to answer to a name that llama.cpp does not have, which alone knows all of its own."""
    names = [known.name for known in KNOWN]
    hint = closest(name, names) or f"; among those that it has are {', '.join(names)}"
    return ConfigError(
        f"--pre-tokenizer is {name!r}, which is none of llama.cpp's{hint}", field="pre_tokenizer"
    )


def steps_of(node: Any, *kinds: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or post-processor, with sequences flattened; of
    these kinds, if some are named."""
    if not isinstance(node, dict):
        return
    if node.get("type") == "Sequence":
        for key in ("normalizers", "pretokenizers", "processors"):
            for child in node.get(key) or []:
                yield from steps_of(child, *kinds)
    elif not kinds or node.get("type") in kinds:
        yield node


def _canonical(step: Mapping[str, Any]) -> Iterator[str]:
    """A pre-tokenizer's step in canonical form; an unknown kind keeps its name and matches none."""
    kind = step.get("type")
    if kind == "ByteLevel":
        if step.get("add_prefix_space"):
            yield "a space in front"
        if step.get("use_regex", True):
            yield split(GPT2_REGEX)
    elif kind == "Split" and step.get("behavior") in ("Isolated", "Removed"):
        # `Removed` with `invert` keeps the matches as the pieces. That equals `Isolated` with a
        # pattern that matches everywhere.
        if (step["behavior"] == "Removed") == bool(step.get("invert")):
            yield split(_pattern(step))
        else:
            yield f"{step['behavior']} {_pattern(step)}, invert {bool(step.get('invert'))}"
    elif kind == "Digits":
        yield DIGITS if step.get("individual_digits") else DIGIT_RUNS
    elif kind == "Punctuation" and step.get("behavior") == "Contiguous":
        yield PUNCTUATION_RUNS
    else:
        rest = {k: v for k, v in step.items() if k != "type"}
        yield f"{kind} {rest}" if rest else str(kind)


def _pattern(node: Mapping[str, Any]) -> str:
    """The expression with line ends as escapes; some files have them raw."""
    pattern = node.get("pattern")
    if isinstance(pattern, dict):
        pattern = pattern.get("Regex", pattern.get("String", ""))
    return str(pattern).replace("\r", r"\r").replace("\n", r"\n")
