"""Reads calls whose arguments are JSON. Any thread."""

from __future__ import annotations

from worker.api.chat.parse.calls import Deltas
from worker.api.chat.parse.json_values import (
    JSON_BLANK,
    WORD,
    from_json,
    read_key,
    read_quoted,
    takes_end,
    to_json,
    value,
)
from worker.api.chat.parse.source import Source, Steps, ignore
from worker.api.chat.request import INPUT

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "tool_call_id", "type", "index")


def read_arguments(
    source: Source, deltas: Deltas, name: str, call_id: str | None = None
) -> Steps[bool]:
    """Read a call's arguments: an object, a string with one, or `null`; false if there are none."""
    yield from source.run_of(JSON_BLANK)
    if (yield from source.peek()) == "{":
        source.forget()
        deltas.call(name, call_id)
        if (yield from value(source, deltas.arguments, deltas.grow)):
            deltas.end_call()
        return True
    text = yield from read_quoted(source)
    if text is None and (yield from source.run_of(WORD)) == "null":
        text = ""
    return text is not None and _whole_call(deltas, name, text, call_id)


def _whole_call(deltas: Deltas, name: str, text: str, call_id: str | None = None) -> bool:
    """Add a call with all of its arguments; false if they are neither an object nor a custom
    tool's text."""
    plain = text.strip()
    source, parts = Source("{}" if plain in ("", "null") else plain, ended=True), list[str]()
    for _ in value(source, parts.append):
        pass
    try:
        is_object = isinstance(from_json("".join(parts)), dict)
    except ValueError:
        is_object = False
    if not is_object and not deltas.use.tools[name].is_custom:
        return False
    deltas.whole_call(name, "".join(parts) if is_object else to_json({INPUT: text}), call_id)
    return True


def read_keyed(source: Source, deltas: Deltas) -> Steps[bool]:
    """Read the members of `{"NAME": {…}}`."""
    if (yield from takes_end(source)) or (key := (yield from read_key(source))) is None:
        return False
    name = deltas.use.offered(key)
    return name is not None and (yield from _read_rest(source, deltas, name))


def read_named(source: Source, deltas: Deltas, *, is_bare: bool) -> Steps[bool]:
    """Read the members of `{"name": …, "arguments": {…}}`, in either order.

    An object without a mark before it (`is_bare`) may be the answer itself. Then a member that a
    call does not have ends the reading, so that the answer is not withheld.
    """
    name: str | None = None
    early = ""
    while not (yield from takes_end(source)):
        key = yield from read_key(source)
        if key in _ARGUMENTS and name is not None:
            return (yield from _read_rest(source, deltas, name))
        if key in _NAMES and name is None:
            name = deltas.use.offered((yield from read_quoted(source)) or "")
            if name is None:
                return False
        elif key is None or (is_bare and key not in _OTHERS):
            return False
        else:
            parts: list[str] = []
            if not (yield from value(source, parts.append)):
                return False
            early = "".join(parts) if key in _ARGUMENTS else early
    if early.startswith('"'):
        early = from_json(early)
    return name is not None and _whole_call(deltas, name, early)


def read_exact(source: Source, deltas: Deltas, *, may_go_on: bool) -> Steps[bool]:
    """Read the members of `{"name": …, "arguments": {…}}`, as a grammar has them. A text that
    cannot become a function's name ends the reading, so that the answer is not withheld.
    `may_go_on`: an object with further members is the answer itself, so the end decides."""
    yield from source.run_of(JSON_BLANK)
    if (yield from read_key(source)) != "name":
        return False
    names, written = {to_json(name): name for name in deltas.use.tools}, ""
    while written not in names:
        n_chars = len(written) + 1
        written = yield from source.peek(n_chars)
        if len(written) < n_chars or not any(name.startswith(written) for name in names):
            return False
    source.take(written)
    if (yield from takes_end(source)) or (yield from read_key(source)) != "arguments":
        return False
    if (yield from source.peek()) != "{":
        return False
    if not may_go_on:
        return (yield from _read_rest(source, deltas, names[written]))
    parts: list[str] = []
    yield from value(source, parts.append)
    yield from source.run_of(JSON_BLANK)
    is_cut = not (yield from source.peek())
    if not is_cut and not (yield from takes_end(source)):
        return False
    deltas.call(names[written])
    deltas.arguments("".join(parts))
    if not is_cut:
        deltas.end_call()
    return True


def _read_rest(source: Source, deltas: Deltas, name: str) -> Steps[bool]:
    """Read the arguments, and drop the rest of the object."""
    is_call = yield from read_arguments(source, deltas, name)
    while is_call and not (yield from takes_end(source)):
        if (yield from read_key(source)) is None:
            break
        yield from value(source, ignore)
    return is_call
