"""The model's own chat template: checked when the model is loaded, rendered in a sandbox.

Rendering gives the text that transformers' `apply_chat_template` gives: the same environment
options, filters and globals. A template comes out of a downloaded file and is treated as hostile:
it cannot reach Python's internals, run for long or produce endless text. Intake thread.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from types import FrameType
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from worker.errors import InvalidRequest, ModelError
from worker.messages import ChatPrompt

MAX_RENDER_SECONDS = 2.0
MAX_OUTPUT_CHARS = 4_000_000
MAX_OPERAND = 100_000
"""Largest repetition count and exponent in a template's arithmetic."""


class _Timeout(Exception):
    pass


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here its
    body is rendered and nothing else."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for operand, other in ((left, right), (right, left)):
            if isinstance(operand, int) and abs(operand) > MAX_OPERAND:
                if operator == "**" or not isinstance(other, int | float):
                    raise jinja2.exceptions.SecurityError(f"{operator} with {operand} is refused")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """
    Raises:
        ModelError: the template is not valid, or reaches for Python's internals.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            tree = environment.parse(source)
            _refuse_internals(tree)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not valid: {error}") from error
        self.takes_tools = "tools" in jinja2.meta.find_undeclared_variables(tree)

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt text of a chat.

        Raises:
            InvalidRequest: the template refuses these messages, or does not end in time.
        """
        variables: dict[str, Any] = {
            **self._special_tokens,
            **(prompt.template_kwargs or {}),
            "messages": [dict(message) for message in prompt.messages],
            "tools": [dict(tool) for tool in prompt.tools] or None,
            "add_generation_prompt": prompt.add_generation_prompt,
        }
        parts: list[str] = []
        n_chars = 0
        try:
            with _Deadline(MAX_RENDER_SECONDS):
                for part in self._template.generate(variables):
                    parts.append(part)
                    n_chars += len(part)
                    if n_chars > MAX_OUTPUT_CHARS:
                        raise _refused("it produces too much text")
        except _Timeout:
            raise _refused(f"it did not end within {MAX_RENDER_SECONDS:g} s") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise _refused(str(error)) from error
        except (RecursionError, MemoryError) as error:
            raise _refused("it needs too many resources") from error
        return "".join(parts)


class _Deadline:
    """Ends Python code of this thread that runs for too long, at its next line."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        end = time.monotonic() + self._seconds

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            if time.monotonic() > end:
                raise _Timeout
            return trace

        self._previous = sys.gettrace()
        sys.settrace(trace)

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._previous)


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"messages: the model's chat template refuses this chat: {reason}", field="messages"
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja's own filter: that one escapes HTML characters.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse_internals(tree: jinja2.nodes.Template) -> None:
    """No chat template needs a name with a leading underscore on an object: such names are how
    a template would climb from a string to the interpreter."""
    nodes = jinja2.nodes
    for node in tree.find_all((nodes.Getattr, nodes.NSRef, nodes.Getitem, nodes.Filter)):
        names: list[Any] = []
        if isinstance(node, jinja2.nodes.Getattr | jinja2.nodes.NSRef):
            names = [node.attr]
        elif isinstance(node, jinja2.nodes.Getitem):
            names = [node.arg.value] if isinstance(node.arg, jinja2.nodes.Const) else []
        elif isinstance(node, jinja2.nodes.Filter) and node.name in ("attr", "map"):
            names = [a.value for a in node.args if isinstance(a, jinja2.nodes.Const)]
            names += [k.value.value for k in node.kwargs if isinstance(k.value, jinja2.nodes.Const)]
        for name in names:
            if isinstance(name, str) and name.startswith("__"):
                raise ModelError(
                    f"the model's chat template reaches for {name!r}, an internal of Python; "
                    "a file that does this is not to be trusted and is not loaded"
                )
