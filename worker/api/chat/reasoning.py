"""What is asked of the model's reasoning: variables of its template, and a number of tokens.

It is asked in several places, the nearest first: the request's fields, its `chat_template_kwargs`,
the flags, `--chat-template-kwargs`. Of the switch, the effort and the budget each, the nearest
place that has one counts. An effort or a budget of nothing is a switch, too, and so gives way to a
nearer one. Pure functions, any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from worker.api.chat.request import Chat, ReasoningOptions
from worker.api.http.state import AppState
from worker.settings import Settings

EFFORT_TOKENS = {"none": 0, "minimal": 256, "low": 512, "medium": 2048, "high": 8192}
"""The budget of an effort, for templates that know nothing of it; others have none. The numbers are
those of llama-server's page."""
UNLIMITED = -1
Value = TypeVar("Value")
_SWITCHES = ("enable_thinking", "thinking")
"""What templates call it."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What all places together ask for."""

    is_on: bool | None
    """`None` leaves it to the template."""
    effort: str | None
    budget: int | None
    """Tokens at most; `None` is any number."""


def reasoning_of(chat: Chat, state: AppState) -> Reasoning:
    template, settings = state.served.chat_template, state.settings
    request = (chat.reasoning, _said_by(chat.template_variables))
    places = (*request, _said_by_flags(settings), _said_by(settings.chat_template_kwargs or {}))
    switch = _nearest([place.enabled for place in places])
    effort = _nearest([place.effort or None for place in places])
    budget = _nearest([place.budget for place in places])
    switches = [switch] if switch else []
    if effort:
        switches.append((effort[0], effort[1] != "none"))
    # More than 0 is a limit to whoever sets it for all; a request that has one wants reasoning.
    if budget and (budget[1] == 0 or (budget[1] > 0 and budget[0] < len(request))):
        switches.append((budget[0], budget[1] > 0))
    is_on = min(switches)[1] if switches else None  # in one place, off counts before on
    if is_on is False:
        return Reasoning(False, "none", 0)
    word = effort[1] if effort and effort[1] != "none" else None
    tokens = budget[1] if budget else UNLIMITED
    if (
        word
        and effort
        and (not budget or effort[0] < budget[0])
        and "reasoning_effort" not in template
    ):
        tokens = EFFORT_TOKENS.get(word, UNLIMITED)
    return Reasoning(is_on, word, tokens if tokens > 0 else None)


def _nearest(values: Sequence[Value | None]) -> tuple[int, Value] | None:
    """The first value that is one, behind its place."""
    return next(((place, each) for place, each in enumerate(values) if each is not None), None)


def _said_by_flags(settings: Settings) -> ReasoningOptions:
    budget = settings.reasoning_budget
    return ReasoningOptions(
        budget=None if budget == UNLIMITED else budget,
        effort=settings.reasoning_effort,
        enabled={"on": True, "off": False}.get(settings.reasoning),
    )


def _said_by(variables: Mapping[str, Any]) -> ReasoningOptions:
    effort, budget = variables.get("reasoning_effort"), variables.get("thinking_budget")
    switches = [variables[name] for name in _SWITCHES if isinstance(variables.get(name), bool)]
    return ReasoningOptions(
        budget=budget if type(budget) is int else None,
        effort=effort if isinstance(effort, str) else None,
        enabled=all(switches) if switches else None,
    )


def template_variables(chat: Chat, state: AppState) -> dict[str, Any]:
    """The variables of a chat's template."""
    asked, template = reasoning_of(chat, state), state.served.chat_template
    found: dict[str, Any] = {
        **(state.settings.chat_template_kwargs or {}),
        **chat.template_variables,
    }
    if asked.is_on is not None:
        found |= dict.fromkeys(_SWITCHES, asked.is_on)
    if isinstance(found.get("reasoning_effort"), str):
        del found["reasoning_effort"]
    effort = asked.effort
    if effort is not None and (effort != "none" or re.search(r"""(["'])none\1""", template)):
        found["reasoning_effort"] = effort
    if asked.budget is not None and "thinking_budget" in template:
        found["thinking_budget"] = asked.budget
    return found
