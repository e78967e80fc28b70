"""The client of the process that renders chat templates (`renderer_child`). It is used by the
engine's intake threads, and by the main thread of a command that checks if a model would start."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from worker.confinement.bounded import BoundedProgram, Ended
from worker.errors import ModelError
from worker.setting_files import MAX_TEMPLATE_CHARS, read_chat_template

_COMPILE_SECONDS = 5.0
"""Processor time to compile a template, which computes its constants. Real templates take 0.1."""


class Refused(Exception):
    """The template cannot be used, or refuses its variables; `str` is a clause that says why."""


class OutOfBounds(Refused):
    """The template takes too much time or memory."""


renderer = cache(partial(BoundedProgram, "worker.engine.text.renderer_child"))
"""The renderer of this process, started at the first call."""


def render(source: str, variables: Mapping[str, Any] | None, seconds: float) -> str:
    """Render a template in at most `seconds` of processor time. Without variables, return a JSON
    array of the words in its expressions.

    Raises:
        Refused: the source is not a valid template, or cannot be trusted; or it refuses the
            variables, or takes too much time or memory.
    """
    try:
        encoded = json.dumps([source, variables]).encode()
    except RecursionError:
        raise Refused("its values are nested too deeply") from None
    try:
        text, reason = json.loads(renderer().ask(encoded, seconds))
    except Ended as error:
        late = error.why == "time"
        raise OutOfBounds(
            "it did not end within its time" if late else "it needs too much memory"
        ) from None
    if reason is not None:
        raise Refused(reason)
    return str(text)


def served_templates(
    named: Callable[[str | None], str | None], file: str | None
) -> tuple[str | None, str | None]:
    """The template to serve with, and a separate one for chats with tools; each may be `None`.
    `named` returns the model's own template of a name; the operator's `file` replaces all of them.

    Raises:
        ConfigError: the file cannot be read, or is too long.
    """
    if file is not None:
        return read_chat_template(file), None
    source = named(None)
    return source, None if source is None else named("tool_use")


def check_template(source: str) -> list[str]:
    """The words in the expressions of a template.

    Raises:
        ModelError: no chat can be rendered with this template.
    """
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ModelError(
            f"the model's chat template has {len(source):,} characters; at most "
            f"{MAX_TEMPLATE_CHARS:,} are allowed"
        )
    try:
        words: list[str] = json.loads(render(source, None, _COMPILE_SECONDS))
    except Refused as error:
        raise ModelError(f"the model's chat template is not valid: {error}") from error
    return words
