"""How a chat's answer is to reason: variables of the model's template, and a number of tokens.

Four places can set a switch, an effort and a budget; of each, the first one counts: the request's
fields, its `chat_template_kwargs`, the worker's flags, and `--chat-template-kwargs`. An effort or a
budget is a switch of its place, too: `none` and 0 turn reasoning off; another effort, or a positive
budget in the request, turns it on. Pure functions, any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from worker.api.chat.request import Chat
from worker.api.http.state import AppState
from worker.settings import SWITCHES

EFFORT_TOKENS = {"none": 0, "minimal": 256, "low": 512, "medium": 2048, "high": 8192}
"""The budget of an effort, for templates without `reasoning_effort`; other efforts have no limit.
The numbers are those of llama-server's page."""
_LEAST = ("none", "no_think", "minimal", "low")
"""Words for the least effort. A template with a default effort, such as gpt-oss's `medium`, gets
the first one that it names, or `low`."""
UNLIMITED = -1

ReasoningChoice = tuple[bool | None, str | None, int | None]
"""Whether to reason, the effort and the most tokens; `None` is no choice. Plain tuples, because
`tests/process/api/test_walk.py` bounds the objects that a request makes."""
_OPEN: ReasoningChoice = (None, None, None)


def reasoning_of(chat: Chat, state: AppState) -> ReasoningChoice:
    """The choice of all places together; `None` leaves it to the template, or sets no limit."""
    asked, own, template = chat.reasoning, chat.template_variables, state.served.chat_template
    settings, default = state.settings, state.settings.chat_template_kwargs
    switch_by_flag = {"on": True, "off": False}.get(settings.reasoning)
    limit = None if settings.reasoning_budget == UNLIMITED else settings.reasoning_budget
    places: tuple[ReasoningChoice, ...] = (
        (asked.enabled, asked.effort, asked.budget),
        _choice_in(own) if own else _OPEN,
        (switch_by_flag, settings.reasoning_effort, limit),
        _choice_in(default) if default else _OPEN,
    )
    numbered = tuple(enumerate(places))
    switches = [(place, is_on) for place, (is_on, _, _) in numbered if is_on is not None][:1]
    effort = next(((place, word) for place, (_, word, _) in numbered if word), None)
    budget = next(((place, most) for place, (_, _, most) in numbered if most is not None), None)
    if effort:
        switches.append((effort[0], effort[1] != "none"))
    # A positive budget in the settings only limits reasoning; in a request it also asks for it.
    if budget and (budget[1] == 0 or (budget[1] > 0 and budget[0] < 2)):
        switches.append((budget[0], budget[1] > 0))
    if switches and not min(switches)[1]:  # of one place's switches, off wins
        return False, "none", 0
    word = effort[1] if effort and effort[1] != "none" else None
    tokens = budget[1] if budget else UNLIMITED
    if effort and word and (not budget or effort[0] < budget[0]):
        if "reasoning_effort" not in template:
            tokens = EFFORT_TOKENS.get(word, UNLIMITED)
    return True if switches else None, word, tokens if tokens > 0 else None


def _choice_in(variables: Mapping[str, Any]) -> ReasoningChoice:
    effort, budget = variables.get("reasoning_effort"), variables.get("thinking_budget")
    switches = [variables[name] for name in SWITCHES if isinstance(variables.get(name), bool)]
    return (
        all(switches) if switches else None,
        effort if isinstance(effort, str) else None,
        budget if type(budget) is int else None,
    )


def template_variables(chat: Chat, choice: ReasoningChoice, state: AppState) -> dict[str, Any]:
    """The variables of a chat's template; `choice` is what `reasoning_of` returns."""
    is_on, effort, budget = choice
    template = state.served.chat_template
    found: dict[str, Any] = {
        **(state.settings.chat_template_kwargs or {}),
        **chat.template_variables,
    }
    if is_on is not None:
        found |= dict.fromkeys(SWITCHES, is_on)
    for name, kind in (("reasoning_effort", str), ("thinking_budget", int)):
        if type(found.get(name)) is kind:  # `choice` includes it, or overrides it
            del found[name]
    if effort == "none":
        has_default = re.search(r"set reasoning_effort\s*=", template) is not None
        words = _LEAST if has_default else _LEAST[:1]
        quoted = (word for word in words if re.search(rf"""(["']){word}\1""", template))
        effort = next(quoted, "low" if has_default else None)
    if effort is not None:
        found["reasoning_effort"] = effort
    if budget is not None and "thinking_budget" in template:
        found["thinking_budget"] = budget
    return found
