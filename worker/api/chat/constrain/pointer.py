"""JSON pointers into a schema. Pure functions, any thread."""

from __future__ import annotations

from collections.abc import Mapping

NOTHING = object()


def resolve(document: object, pointer: str) -> object:
    """The target of a JSON pointer in a fragment (`#/$defs/a`), or `NOTHING`."""
    found = document
    for step in pointer[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key, NOTHING)
        elif isinstance(found, list) and key.isascii() and key.isdigit() and len(key) < 6:
            found = found[int(key)] if int(key) < len(found) else NOTHING
        else:
            return NOTHING
    return found
