"""The model's own chat template: checked when the model is loaded, rendered in another process.

It renders what transformers' `apply_chat_template` renders: the environment's options, filters and
globals are the same, and `forms` convert each chat to the form that the template reads.
Intake threads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from worker.engine.text import forms, probes
from worker.engine.text.deletions import Deletion, deletions_of
from worker.engine.text.forms import Chat, Form
from worker.engine.text.renderer import (
    OutOfBounds,
    Refused,
    check_template,
    render,
    served_templates,
)
from worker.errors import InvalidRequest
from worker.llama.model import Model
from worker.wire.work import ChatPrompt

MAX_RENDER_SECONDS = 2.0
_SECONDS_A_MESSAGE = 0.003
"""Added for each message: some templates loop over all messages at each of them."""
_PROBE_SECONDS = 0.2
_END = "\ue002end of the message\ue003 "
"""Appended to the message that is to be continued while it is rendered, to find its end."""
_REASONING = "continued_reasoning"
"""The reasoning to continue: a key of the chat, so that control tokens are found in it, too."""


class ChatTemplate:
    """A chat template, with the forms that it reads.

    Raises:
        ModelError: the template is invalid, or accesses Python's internals.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_use: str | None = None
    ) -> None:
        """`tool_use` is the model's second template, for chats with tools."""
        self._words = check_template(source)
        self.source, self._special_tokens = source, dict(special_tokens)
        self.tool_use = ChatTemplate(tool_use, special_tokens) if tool_use is not None else None
        self._probing_seconds = 0.0
        self._forms: tuple[Form, ...] = probes.forms_of(self._probed)
        in_words = {forms.in_words, forms.listed} & set(self._forms)
        self.takes_tools = self.tool_use is not None or not in_words
        """Whether the template takes tools; otherwise they are described in words."""

    def _probed(self, chat: Chat) -> str | None:
        """The rendered chat; `None` if the template refuses it, or refusals have taken too long."""
        if self._probing_seconds > MAX_RENDER_SECONDS:
            return None
        began = time.monotonic()
        try:
            return self.rendered(chat, _PROBE_SECONDS)
        except Refused:
            self._probing_seconds += time.monotonic() - began
            return None

    @cached_property
    def deletions(self) -> tuple[Deletion, ...]:
        """What the template deletes from texts; found at the first chat for which it matters."""

        def rendered(chat: Chat) -> str | None:
            for form in self._forms:
                chat = form(chat)
            return self._probed(chat)

        return deletions_of(self._words, rendered)

    def read(self, prompt: ChatPrompt) -> Reading:
        if prompt.tools and self.tool_use is not None:
            return self.tool_use.read(prompt)
        now = datetime.now()
        chat: Chat = {
            "date_string": now.strftime("%d %b %Y"),
            "datetime": now.strftime("%b %d %Y"),
            **(prompt.template_kwargs or {}),
            "messages": [dict(message) for message in prompt.messages],
            "tools": [dict(tool) for tool in prompt.tools] or None,
            "add_generation_prompt": prompt.add_generation_prompt,
        }
        if prompt.continue_final_message and prompt.reasoning_marks is not None:
            chat[_REASONING] = chat["messages"].pop().get("reasoning_content") or ""
            chat["add_generation_prompt"] = True
        elif prompt.continue_final_message:
            final = chat["messages"][-1]
            final["content"] = forms.appended(final.get("content"), _END, between="")
        try:
            for form in self._forms:
                chat = form(chat)
        except RecursionError as error:
            raise _refused(prompt.field, "the arguments of a call are nested too deeply") from error
        return Reading(self, chat, prompt)

    def rendered(self, chat: Chat, seconds: float) -> str:
        """
        Raises:
            Refused: the template refuses the chat, or takes too much time or memory.
        """
        return render(self.source, {**self._special_tokens, **chat}, seconds)


@dataclass(frozen=True, slots=True)
class Reading:
    """A chat in the forms that its template reads."""

    template: ChatTemplate
    chat: Chat
    prompt: ChatPrompt
    """The prompt that the chat was made from."""

    def text(self) -> str:
        """
        Raises:
            InvalidRequest: the template refuses these messages, or takes too long.
        """
        field, seconds_more = self.prompt.field, _SECONDS_A_MESSAGE * len(self.chat["messages"])
        try:
            text = self.template.rendered(self.chat, MAX_RENDER_SECONDS + seconds_more)
            if not self.prompt.continue_final_message:
                return text
            if self.prompt.reasoning_marks is None:
                return _before_end(text)
            return _opened(text, *self.prompt.reasoning_marks) + str(self.chat[_REASONING])
        except OutOfBounds as error:
            raise _refused(field, str(error)) from error
        except Refused as error:
            reason = str(error)
            if place := forms.broken_arguments(self.prompt.messages):  # they may be why
                field, reason = f"{field}{place}", f"{reason}; this is not a JSON object"
            raise _refused(field, reason) from error


def _before_end(text: str) -> str:
    """The rendered text up to the end of the last message's content."""
    mark = _END.rstrip()
    before, found, after = text.rpartition(mark)
    if not found:
        raise Refused("it leaves out the last message, which is to be continued")
    # A template that has trimmed the mark's end has trimmed the message, too.
    return before if after.startswith(_END[len(mark) :]) else before.rstrip()


def _opened(text: str, begin: str, end: str) -> str:
    """The text with an open block of reasoning at its end. The template may have written the mark
    that begins one, a part of that mark, or an empty block."""
    if text.rstrip().endswith(begin.rstrip()):
        return text
    empty = re.search(rf"(?:{re.escape(begin.rstrip())}\s*)?{re.escape(end)}\s*\Z", text)
    if empty is not None:
        text = text[: empty.start()]
    n_begun = next(n for n in range(len(begin), -1, -1) if text.endswith(begin[:n]))
    return text + begin[n_begun:]


def _refused(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest.of_field(field, f"the model's chat template refuses this chat: {reason}")


# --- which template ----------------------------------------------------------------------------


def template_of(model: Model, file: str | None) -> ChatTemplate | None:
    """The template to serve with, the model's own or the operator's; `None` if there is none.

    Runs during the start.

    Raises:
        ConfigError: the operator's file cannot be read, or is too long.
        ModelError: the template is not valid, or too long.
    """
    source, tool_use = served_templates(model.chat_template, file)
    if source is None:
        return None
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}
    names |= {"unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
    special = {}
    for name, key in names.items():
        token = model.metadata(f"tokenizer.ggml.{key}")
        special[name] = model.token_text(int(token)) if token is not None else ""
    return ChatTemplate(source, special, tool_use)
