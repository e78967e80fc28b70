r"""Finds llama.cpp's name for the pre-tokenizer that a `tokenizer.json` defines.

llama.cpp has pre-tokenizers by name; `tokenizer.json` defines one as steps, each of which splits
the pieces of the last. Both get a canonical form here, a tuple of step strings, and are compared.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from worker.convert.tokenizer import corpus
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
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    "Ὀ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴ"
    "ℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""DeepSeek's letters that have a case, as its definition lists them."""
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    name: str
    """The value of `tokenizer.ggml.pre`."""
    steps: Steps
    ignore_merges: bool = False
    """A word that is a token is taken whole, without its merges."""
    is_exact: bool = True
    """Whether llama.cpp splits every text as the definition does; else only short ASCII ones."""


def split(pattern: str) -> str:
    return f"split {pattern}"


DIGITS = "digits one by one"
DIGIT_RUNS = "digits in runs"
PUNCTUATION_RUNS = "punctuation in runs"
_PUNCTUATION = r"[!-/:-@\[-`{-~\p{P}]"
_EXPRESSIONS = {DIGITS: r"\p{N}", DIGIT_RUNS: r"\p{N}+", PUNCTUATION_RUNS: f"{_PUNCTUATION}+"}


def _known(
    name: str, *steps: str, ignore_merges: bool = False, is_exact: bool = True
) -> PreTokenizer:
    """Each step is a key of `_EXPRESSIONS`, or an expression to split by."""
    forms = tuple(step if step in _EXPRESSIONS else split(step) for step in steps)
    return PreTokenizer(name, forms, ignore_merges, is_exact)


_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_GPT4O = rf"{_MARKED[0]}{_CONTRACTIONS}?|{_MARKED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASH_TAIL}"
_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))

KNOWN: tuple[PreTokenizer, ...] = (
    _known("gpt-2", GPT2_REGEX),
    _known("llama-bpe", _LLAMA3, ignore_merges=True),
    _known("dbrx", _LLAMA3),
    _known("qwen2", rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_TAIL}"),
    _known(
        "qwen35",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    _known(
        "jais-2",
        rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        rf"|\s*[\r\n]+|{_SPACES}|\s{{1}}",
    ),
    _known(
        "seed-coder",
        rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1}}"
        r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    _known(
        "exaone-moe",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        is_exact=False,  # Its words have spaces in them, so no text bounds their length.
    ),
    _known(
        "bailingmoe",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    _known(
        "minicpm5",
        r"\p{N}{1,3}",
        rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_TAIL}",
        ignore_merges=True,
    ),
    _known("smollm", DIGITS, GPT2_REGEX),
    _known("falcon", PUNCTUATION_RUNS, GPT2_REGEX, DIGIT_RUNS, "[0-9][0-9][0-9]"),
    _known(
        "deepseek-coder",
        *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGITS),
        is_exact=False,
    ),
    _known(
        "deepseek-llm",
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        *(r"\s+$", "[一-龥ࠀ-一가-퟿]+", DIGITS),
        is_exact=False,
    ),
    _known(
        "deepseek-v3",
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    _known(
        "tekken",
        rf"{_MARKED[0]}|{_MARKED[1]}|\p{{N}}|{_SLASH_TAIL}",
        ignore_merges=True,
        is_exact=False,
    ),
    _known("gpt-4o", _GPT4O, is_exact=False),
    _known("tiny_aya", r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O, is_exact=False),
    _known(
        "kimi-k2",
        rf"[\p{{Han}}]+|{_NO_HAN[0]}{_CONTRACTIONS}?|{_NO_HAN[1]}{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}|{_TAIL}",
        ignore_merges=True,
        is_exact=False,
    ),
)


UNKNOWN = "unknown pre-tokenizer type"
"""Part of llama.cpp's error for a name that it does not know."""


def named(name: str) -> PreTokenizer:
    """The pre-tokenizer of this name; without steps if it is not in `KNOWN`."""
    return next((known for known in KNOWN if known.name == name), PreTokenizer(name, ()))


def split_of(pre: PreTokenizer, *, ignore_merges: bool = False) -> list[str]:
    """The expressions by which the worker splits a text, in order; empty if llama.cpp's own
    pre-tokenizer splits exactly as defined and, if `ignore_merges` asks for it, takes words whole.

    Also empty if a word can be a space and a number: llama.cpp would split such a word again.
    """
    if pre.is_exact and pre.ignore_merges >= ignore_merges:
        return []
    if split(GPT2_REGEX) in pre.steps and DIGITS not in pre.steps:
        return []
    return [_EXPRESSIONS.get(step) or step.removeprefix(split("")) for step in pre.steps]


def recognise(tokenizer: Mapping[str, Any]) -> PreTokenizer:
    """llama.cpp's pre-tokenizer with the steps of a `tokenizer.json`. If there is none, but the
    worker can split by these steps, returns them under the nearest one's name, as not exact.

    Raises:
        ModelError: no known pre-tokenizer has this definition, and the worker cannot split by it;
            the message names the nearest.
    """
    found = list(steps_of(tokenizer.get("pre_tokenizer")))
    steps = _all_canonical(found)
    whole = bool(tokenizer["model"].get("ignore_merges", False))
    same = [k for k in KNOWN if k.steps == steps]
    if same:
        return next((k for k in same if k.ignore_merges == whole), same[0])
    text = "; ".join(steps) or "no pre-tokenizer"
    nearest = max(KNOWN, key=lambda k: (_likeness(text, k), k.ignore_merges == whole))
    ours = PreTokenizer(nearest.name, steps, is_exact=False)
    if found and found[-1].get("type") == "ByteLevel" and _is_ours_to_split(ours):
        return ours
    raise ModelError(
        f"tokenizer.json: llama.cpp has no known pre-tokenizer of this definition ({text}); "
        f"the nearest is {nearest.name} ({'; '.join(nearest.steps)}), "
        f"which --pre-tokenizer {nearest.name} selects",
        pre_tokenizer=text,
        nearest=nearest.name,
    )


def _likeness(text: str, known: PreTokenizer) -> float:
    return difflib.SequenceMatcher(None, text, "; ".join(known.steps), autojunk=False).ratio()


def _is_ours_to_split(pre: PreTokenizer) -> bool:
    """Whether the worker can split by these steps: each word of the texts of `corpus` must be one
    that `source_tokenizer.NEUTRAL` leaves whole, of up to three numbers or without any."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Sequence, Split

    if not all(step in _EXPRESSIONS or step.startswith(split("")) for step in pre.steps):
        return False
    try:
        cuts = Sequence([Split(Regex(each), "isolated") for each in split_of(pre)])
    except Exception:  # The library raises no narrower class.
        return False
    words = [word for text in corpus.TEXTS for word, _ in cuts.pre_tokenize_str(text)]
    numbers = ([unicodedata.category(c)[0] == "N" for c in word] for word in words)
    return all(not any(each) or (all(each) and len(each) <= 3) for each in numbers)


def unknown(name: str) -> ConfigError:
    """The error for a name that llama.cpp, which alone knows all of its names, has refused."""
    names = [known.name for known in KNOWN]
    hint = closest(name, names) or f"; among those that it has are {', '.join(names)}"
    return ConfigError(
        f"--pre-tokenizer is {name!r}, which llama.cpp does not have{hint}", field="pre_tokenizer"
    )


def steps_of(node: Any, *kinds: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or post-processor, with sequences flattened; if
    `kinds` are given, only steps of these."""
    if not isinstance(node, dict):
        return
    if node.get("type") == "Sequence":
        for key in ("normalizers", "pretokenizers", "processors"):
            for child in node.get(key) or []:
                yield from steps_of(child, *kinds)
    elif not kinds or node.get("type") in kinds:
        yield node


def same(one: Iterable[Mapping[str, Any]], other: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the steps of two pre-tokenizers split every text alike."""
    return _all_canonical(one) == _all_canonical(other)


def _all_canonical(steps: Iterable[Mapping[str, Any]]) -> Steps:
    return tuple(canonical for step in steps for canonical in _canonical(step))


def _canonical(step: Mapping[str, Any]) -> Iterator[str]:
    """A pre-tokenizer's step in canonical form; an unknown kind keeps its name and matches none."""
    kind = step.get("type")
    if kind == "ByteLevel":
        if step.get("add_prefix_space"):
            yield "a space in front"
        if step.get("use_regex", True):
            yield split(GPT2_REGEX)
    elif kind == "Split":
        yield _split_step(step, _pattern(step))
    elif kind == "Punctuation":
        is_run = step.get("behavior") == "Contiguous"
        yield PUNCTUATION_RUNS if is_run else _split_step(step, _PUNCTUATION)
    elif kind == "Digits":
        yield DIGITS if step.get("individual_digits") else DIGIT_RUNS
    else:
        rest = {k: v for k, v in step.items() if k != "type"}
        yield f"{kind} {rest}" if rest else str(kind)


def _split_step(step: Mapping[str, Any], pattern: str) -> str:
    """The equal split into matches and the texts between them, or a form that no known one has."""
    behavior, inverted = step.get("behavior"), bool(step.get("invert"))
    # `Removed` with `invert` keeps the matches as the pieces. That equals `Isolated` with a
    # pattern that matches everywhere.
    if behavior == "Isolated" or (behavior == "Removed" and inverted):
        return split(pattern)
    if not inverted and behavior == "Contiguous":
        return split(f"(?:{pattern})+")
    if not inverted and behavior == "MergedWithNext":
        return split(rf"(?:{pattern})(?:(?!{pattern})[\s\S])*")
    if not inverted and behavior == "MergedWithPrevious":
        return split(rf"(?:(?!{pattern})[\s\S])*(?:{pattern})")
    return f"{behavior} {pattern}, invert {inverted}"


def _pattern(node: Mapping[str, Any]) -> str:
    """The expression, with line ends as escapes, which some files have raw."""
    pattern = node.get("pattern")
    if isinstance(pattern, dict):
        literal = re.escape(str(pattern.get("String", "")))
        pattern = pattern.get("Regex", literal)
    return str(pattern).replace("\r", r"\r").replace("\n", r"\n")
