"""What is asked of the model's reasoning: variables of its template, and a number of tokens.

It is asked in several places, the nearest first: the request's fields, its `chat_template_kwargs`,
the flags, `--chat-template-kwargs`. Of the switch, the effort and the budget each, the nearest
place that has one counts. An effort or a budget of nothing is a switch, too, and so gives way to a
nearer one. Pure functions, any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from worker.api.chat.request import Chat
from worker.api.http.state import AppState
from worker.settings import SWITCHES

EFFORT_TOKENS = {"none": 0, "minimal": 256, "low": 512, "medium": 2048, "high": 8192}
"""The budget of an effort, for templates that know nothing of it; others have none. The numbers are
those of llama-server's page."""
UNLIMITED = -1

Said = tuple[bool | None, str | None, int | None]
"""Whether the model reasons, with what effort and in how many tokens; `None` is not said."""
_NOTHING: Said = (None, None, None)


def reasoning_of(chat: Chat, state: AppState) -> Said:
    """What all places say together: no switch leaves it to the template, and no budget is any
    number of tokens."""
    asked, own, template = chat.reasoning, chat.template_variables, state.served.chat_template
    settings, given = state.settings, state.settings.chat_template_kwargs
    limit = None if settings.reasoning_budget == UNLIMITED else settings.reasoning_budget
    places: tuple[Said, ...] = (
        (asked.enabled, asked.effort, asked.budget),
        _said_by(own) if own else _NOTHING,
        ({"on": True, "off": False}.get(settings.reasoning), settings.reasoning_effort, limit),
        _said_by(given) if given else _NOTHING,
    )
    switch = effort = budget = None  # each behind its place
    for place, (is_on, word, tokens) in enumerate(places):
        if switch is None and is_on is not None:
            switch = place, is_on
        if effort is None and word:
            effort = place, word
        if budget is None and tokens is not None:
            budget = place, tokens
    switches = [switch] if switch else []
    if effort:
        switches.append((effort[0], effort[1] != "none"))
    # More than 0 is a limit to whoever sets it for all; a request that has one wants reasoning.
    if budget and (budget[1] == 0 or (budget[1] > 0 and budget[0] < 2)):
        switches.append((budget[0], budget[1] > 0))
    if switches and not min(switches)[1]:  # in one place, off counts before on
        return False, "none", 0
    word = effort[1] if effort and effort[1] != "none" else None
    tokens = budget[1] if budget else UNLIMITED
    if effort and word and (not budget or effort[0] < budget[0]):
        if "reasoning_effort" not in template:
            tokens = EFFORT_TOKENS.get(word, UNLIMITED)
    return True if switches else None, word, tokens if tokens > 0 else None


def _said_by(variables: Mapping[str, Any]) -> Said:
    effort, budget = variables.get("reasoning_effort"), variables.get("thinking_budget")
    switches = [variables[name] for name in SWITCHES if isinstance(variables.get(name), bool)]
    return (
        all(switches) if switches else None,
        effort if isinstance(effort, str) else None,
        budget if type(budget) is int else None,
    )


def template_variables(chat: Chat, said: Said, state: AppState) -> dict[str, Any]:
    """The variables of a chat's template; `said` is what `reasoning_of` gives."""
    is_on, effort, budget = said
    template = state.served.chat_template
    found: dict[str, Any] = {
        **(state.settings.chat_template_kwargs or {}),
        **chat.template_variables,
    }
    if is_on is not None:
        found |= dict.fromkeys(SWITCHES, is_on)
    for name, kind in (("reasoning_effort", str), ("thinking_budget", int)):
        if type(found.get(name)) is kind:  # it has been read, and may count no more
            del found[name]
    if effort is not None and (effort != "none" or re.search(r"""(["'])none\1""", template)):
        found["reasoning_effort"] = effort
    if budget is not None and "thinking_budget" in template:
        found["thinking_budget"] = budget
    return found
