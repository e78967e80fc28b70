"""The regular expressions of schemas that the engine can enforce. Pure functions, any thread.

Clients write them for JavaScript, Python or Rust. The engine reads Rust's syntax and cannot look
around a place. An expression that it would refuse although another language has it, or whose
classes it would read differently, is not enforced.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from worker.api.chat.constrain import sizes

MAX_CHARS = 4000
_ZODS_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)"
_IMPLIED_BY_EMAIL = re.compile(r"^(\^)?(?:\(\?!\\\.\)|\(\?!\.\*\\\.\\\.\))+")
_HEX = "[0-9A-Fa-f]"
_ESCAPE = (
    r"\\(?:[aftnrvdDsSwW]|(?![0-9A-Za-z<>])[\x00-\x7f]|[xuU]\{[0-9A-Fa-f]+\}"
    rf"|x{_HEX}{{2}}|u(?![dD][89a-fA-F]){_HEX}{{4}}|U{_HEX}{{8}}|[pP](?:[A-Z]|\{{[^{{}}]+\}}))"
)
_FLAGS = "(?:[imsuUxR]+(?:-[imsUxR]+)?|-[imsUxR]+)"
_TOKEN = re.compile(
    rf"""(?P<part> \[ \^?+ \]?+ (?: \[:\^?\w+:\] | (?!&&|--|~~)[^\\[\]] | {_ESCAPE} )*+ \]
        | {_ESCAPE} | [^[(){{|^$*+?\\] )
    | (?P<repetition> [*+?] | \{{ \s*+ [0-9]++ \s*+ (?: , \s*+ (?: [0-9]++ \s*+ )?+ )?+ \}} )
    | (?P<open> \( (?: (?!\?) | \? (?: (?P<flags> {_FLAGS}? ) : | P?<[^\W\d]\w*> ) ) )
    | \(\? (?P<switch> {_FLAGS} ) \)
    | (?P<start> \^ | \\A ) | (?P<end> \$ | \\z ) | (?P<or> \| ) | (?P<close> \) )
    """,
    re.VERBOSE,
)


@dataclass(slots=True)
class _Group:
    """A group that is open, or the whole expression."""

    begins: bool
    """Whether nothing comes before it."""
    at_start: bool
    """Whether nothing comes before the next part."""
    anchor: str = ""
    """`end` if it has an anchor of the end, or else `start` if it has one of the start."""


def pattern_of(text: str, format: object) -> str | None:
    """The regular expression to enforce; `None` if it cannot be, or is too large."""
    if format == "email":
        # Zod's pattern begins with lookaheads for dots where no e-mail address may have them.
        text = _IMPLIED_BY_EMAIL.sub(r"\1", text)
    if format == "duration" and text.startswith(_ZODS_DURATION):
        return "^P"  # the lookahead requires what every duration has
    is_small = len(text) <= MAX_CHARS and sizes.size(text) <= sizes.MAX_SIZE
    return text if is_small and _is_supported(text) else None


def _is_supported(text: str) -> bool:
    """Whether the engine has all of the syntax, and anchors are only where the whole begins and
    ends. What no language accepts may pass: the engine says what is wrong with it."""
    groups, at, multiline = [_Group(True, True)], 0, False
    follows = ""  # the anchor of the part just before
    while at < len(text):
        token, group = _TOKEN.match(text, at), groups[-1]
        if token is None:
            return False
        at, kind = token.end(), token.lastgroup or ""
        multiline |= "m" in (token["flags"] or token["switch"] or "")
        if follows == "end" and kind not in ("end", "or", "close"):
            return False
        match kind:
            case "start" | "end":
                if multiline or (kind == "start" and not group.at_start):
                    return False
                follows, group.anchor = kind, min(kind, group.anchor or kind)
                continue
            case "open":
                groups.append(_Group(group.at_start, group.at_start))
            case "or":
                group.at_start = group.begins
            case "close" if len(groups) > 1:
                follows = groups.pop().anchor
                outer = groups[-1]
                outer.at_start, outer.anchor = (
                    False,
                    min(filter(None, (follows, outer.anchor)), default=""),
                )
                continue
            case "repetition" if follows:
                return False
            case "part":
                group.at_start = False
        follows = ""
    return True
