"""The model's own chat template: checked when the model is loaded, rendered in a sandbox.

Rendering gives the same text as transformers' `apply_chat_template`: it has the same environment
options, filters and globals. A template comes from a downloaded file and is treated as hostile: it
cannot reach Python's internals, run for long or fill the memory. Intake threads.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from types import FrameType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes

from worker.engine.text.sandbox import MAX_OUTPUT_CHARS, Sandbox, bound_operations, to_json
from worker.errors import InvalidRequest, ModelError
from worker.wire.work import ChatPrompt

MAX_SOURCE_CHARS = 100_000
"""Of a template; those of today's models have a tenth of that."""
MAX_RENDER_SECONDS = 2.0
MAX_RENDER_BYTES = 512 * 2**20
"""How much this process may grow meanwhile."""
_LOOK_SECONDS = 0.005
_MAX_STRFTIME_CHARS = 200


class _Timeout(Exception):
    pass


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; only its body
    is rendered."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatTemplate:
    """
    Raises:
        ModelError: the template is invalid, or reaches for Python's internals.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_use: str | None = None
    ) -> None:
        """`tool_use` is the model's second template, for chats with tools."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        if len(source) > MAX_SOURCE_CHARS:
            raise ModelError(
                f"the model's chat template has {len(source):,} characters; at most "
                f"{MAX_SOURCE_CHARS:,} are taken"
            )
        try:
            tree = environment.parse(source)
            _refuse_internals(tree)
            self._template = environment.from_string(bound_operations(tree))
        except (RecursionError, MemoryError) as error:
            raise ModelError("the model's chat template is nested too deeply") from error
        except (jinja2.TemplateError, SyntaxError, ValueError) as error:
            raise ModelError(f"the model's chat template is not valid: {error}") from error
        self._knows_developer = "developer" in source
        self._tool_use = ChatTemplate(tool_use, special_tokens) if tool_use is not None else None
        variables = jinja2.meta.find_undeclared_variables(tree)
        self.takes_tools = "tools" in variables or self._tool_use is not None

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt text of a chat.

        Raises:
            InvalidRequest: the template refuses these messages, or takes too long.
        """
        if prompt.tools and self._tool_use is not None:
            return self._tool_use.render(prompt)
        variables: dict[str, Any] = {
            **self._special_tokens,
            **(prompt.template_kwargs or {}),
            "messages": [self._message(message) for message in prompt.messages],
            "tools": [dict(tool) for tool in prompt.tools] or None,
            "add_generation_prompt": prompt.add_generation_prompt,
        }
        parts: list[str] = []
        n_chars = 0
        try:
            with _Bounds(MAX_RENDER_SECONDS, MAX_RENDER_BYTES):
                for part in self._template.generate(variables):
                    parts.append(part)
                    n_chars += len(part)
                    if n_chars > MAX_OUTPUT_CHARS:
                        raise _refused("it produces too much text")
        except _Timeout:
            raise _refused(f"it did not end within {MAX_RENDER_SECONDS:g} s") from None
        except InvalidRequest:
            raise
        except (RecursionError, MemoryError) as error:
            raise _refused("it needs too many resources") from error
        except Exception as error:  # the template's own code may raise anything
            raise _refused(str(error) or type(error).__name__) from error
        text = "".join(parts)
        return _until_final_message(text, prompt) if prompt.continue_final_message else text

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message for the template; `developer` becomes `system` if the template lacks that
        role."""
        flat = dict(message)
        if flat.get("role") == "developer" and not self._knows_developer:
            flat["role"] = "system"
        return flat


def _until_final_message(text: str, prompt: ChatPrompt) -> str:
    """The rendered text up to the end of the last message's content."""
    final = str(prompt.messages[-1].get("content") or "")
    place = text.rfind(final.strip())
    if place < 0 or not final.strip():
        raise _refused("it leaves out the last message, which is to be continued")
    if text.startswith(final, place - (len(final) - len(final.lstrip()))):
        return text[: place + len(final.lstrip())]
    return text[: place + len(final.strip())]


class _Bounds:
    """Ends Python code of this thread that runs for too long, or lets the process grow by too
    much where the system tells its size (Linux), at its next line."""

    def __init__(self, seconds: float, n_bytes: int) -> None:
        self._seconds, self._n_bytes = seconds, n_bytes

    def __enter__(self) -> None:
        began = next_look = time.monotonic()
        before: int | None = None

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal before, next_look
            now = time.monotonic()
            if now > began + self._seconds:
                raise _Timeout
            if now > next_look + _LOOK_SECONDS:
                next_look, size = now, _own_bytes()
                before = size if before is None else before
                if size > before + self._n_bytes:
                    raise MemoryError
            return trace

        self._previous = sys.gettrace()
        sys.settrace(trace)

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._previous)


def _own_bytes() -> int:
    """Memory of this process alone, files that it maps left out; 0 where nobody tells."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_STRFTIME_CHARS:
        raise jinja2.TemplateError("such a long format of a date is refused")
    return datetime.now().strftime(form)


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"messages: the model's chat template refuses this chat: {reason}", field="messages"
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _refuse_internals(tree: jinja2.nodes.Template) -> None:
    """Refuse names with two leading underscores: a template could climb through them from a string
    to the interpreter, and no chat template needs one."""
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
