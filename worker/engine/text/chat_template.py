"""The model's own chat template: checked when the model is loaded, rendered in a sandbox.

It renders what transformers' `apply_chat_template` renders: the environment's options, filters and
globals are the same, and `conversation` brings each chat into the form that the template reads.
Intake threads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes

from worker.engine.text import conversation
from worker.engine.text.conversation import Chat, Form
from worker.engine.text.sandbox import OutOfTime, Sandbox, bounded, check
from worker.errors import InvalidRequest, ModelError
from worker.wire.work import ChatPrompt

MAX_SOURCE_CHARS = 100_000
"""Of a template; those of today's models have a tenth of that."""
MAX_RENDER_SECONDS = 2.0
_COMPILE_SECONDS = 20.0
_MAX_STRFTIME_CHARS = 200
_END = "\ue002end of the message\ue003 "
"""Follows the message that is to be continued while it is rendered."""


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
        self._template = _compiled(source)
        self._forms: tuple[Form, ...] = ()
        until = time.monotonic() + MAX_RENDER_SECONDS
        self._forms = conversation.forms_of(lambda chat: self._probed(chat, until))
        self._tool_use = ChatTemplate(tool_use, special_tokens) if tool_use is not None else None

    def _probed(self, chat: Chat, until: float) -> str | None:
        """The rendered chat; `None` if the template refuses it, or has no time left."""
        try:
            return self.rendered(chat, until - time.monotonic())
        except InvalidRequest:
            return None

    @property
    def takes_tools(self) -> bool:
        """Otherwise tools are described in words."""
        return self._tool_use is not None or not conversation.tells_tools_in_words(self._forms)

    def read(self, prompt: ChatPrompt) -> Reading:
        if prompt.tools and self._tool_use is not None:
            return self._tool_use.read(prompt)
        now = datetime.now()
        chat: Chat = {
            "date_string": now.strftime("%d %b %Y"),
            "datetime": now.strftime("%b %d %Y"),
            **(prompt.template_kwargs or {}),
            "messages": [dict(message) for message in prompt.messages],
            "tools": [dict(tool) for tool in prompt.tools] or None,
            "add_generation_prompt": prompt.add_generation_prompt,
        }
        if prompt.continue_final_message:
            final = chat["messages"][-1]
            final["content"] = conversation.joined(final.get("content"), _END, between="")
        try:
            for form in self._forms:
                chat = form(chat)
        except RecursionError as error:
            raise _refused("the arguments of a call are nested too deeply") from error
        return Reading(self, chat, prompt.continue_final_message)

    def render(self, prompt: ChatPrompt) -> str:
        """The prompt text of a chat; raises as `Reading.text`."""
        return self.read(prompt).text()

    def rendered(self, chat: Chat, seconds: float) -> str:
        parts: list[str] = []
        n_chars = 0
        try:
            with bounded(seconds):
                for part in self._template.generate({**self._special_tokens, **chat}):
                    parts.append(part)
                    n_chars += len(part)
                    check(n_chars)
        except OutOfTime:
            raise _refused(f"it did not end within {MAX_RENDER_SECONDS:g} s") from None
        except (RecursionError, MemoryError) as error:
            raise _refused("it needs too many resources") from error
        except Exception as error:  # the template's own code may raise anything
            raise _refused(str(error) or type(error).__name__) from error
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class Reading:
    """A chat in the forms that its template reads."""

    template: ChatTemplate
    chat: Chat
    continues: bool

    def text(self) -> str:
        """
        Raises:
            InvalidRequest: the template refuses these messages, or takes too long.
        """
        text = self.template.rendered(self.chat, MAX_RENDER_SECONDS)
        return _before_end(text) if self.continues else text


def _compiled(source: str) -> jinja2.Template:
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    if len(source) > MAX_SOURCE_CHARS:
        raise ModelError(
            f"the model's chat template has {len(source):,} characters; at most "
            f"{MAX_SOURCE_CHARS:,} are taken"
        )
    try:
        with bounded(_COMPILE_SECONDS):  # jinja folds constants
            tree = environment.parse(source)
            _refuse_internals(tree)
            return environment.from_string(tree)
    except (RecursionError, MemoryError, OutOfTime) as error:
        raise ModelError("the model's chat template is nested too deeply") from error
    except (jinja2.TemplateError, SyntaxError, ValueError) as error:
        raise ModelError(f"the model's chat template is not valid: {error}") from error


def _before_end(text: str) -> str:
    """The rendered text up to the end of the last message's content."""
    mark = _END.rstrip()
    before, found, after = text.rpartition(mark)
    if not found:
        raise _refused("it leaves out the last message, which is to be continued")
    # The template has trimmed the message if it has trimmed the end of it.
    return before if after.startswith(_END[len(mark) :]) else before.rstrip()


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
