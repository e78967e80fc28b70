"""What a request asks of the model's reasoning: variables of its template, and a number of tokens.
Pure functions, any thread."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from worker.api.chat.request import Chat, ReasoningOptions
from worker.api.http.state import AppState

EFFORT_TOKENS = {"none": 0, "minimal": 256, "low": 512, "medium": 2048, "high": 8192}
"""The budget of an effort, for templates that know nothing of it; others have none. The numbers are
those of llama-server's page."""
UNLIMITED = -1


def template_variables(chat: Chat, state: AppState) -> dict[str, Any]:
    """The variables of a chat's template: the worker's, the request's fields', and last those that
    the request names itself."""
    asked, settings = chat.reasoning, state.settings
    found: dict[str, Any] = dict(settings.chat_template_kwargs or {})
    effort = asked.effort or settings.reasoning_effort
    budget = settings.reasoning_budget if asked.budget is None else asked.budget
    enabled = asked.enabled
    if effort == "none" or budget == 0:
        enabled = False
    elif enabled is None and asked.budget is not None and asked.budget > 0:
        enabled = True
    if enabled is not None:
        found |= {"enable_thinking": enabled, "thinking": enabled}
    template = state.served.chat_template
    if effort is not None and (effort != "none" or re.search(r"""(["'])none\1""", template)):
        found["reasoning_effort"] = effort
    if budget > 0 and "thinking_budget" in template:
        found["thinking_budget"] = budget
    return {**found, **chat.template_variables}


def budget_of(
    asked: ReasoningOptions, variables: Mapping[str, Any] | None, state: AppState
) -> int | None:
    """Tokens of reasoning at most: the request's own number, or its effort's, or the worker's;
    `None` is any number.

    `variables` are those of a chat's template. They are `None` for a raw prompt, for which the
    request's own number counts alone.
    """
    settings, budget = state.settings, asked.budget
    if variables is not None and variables.get("enable_thinking") is False:
        return 0
    if budget is None and variables is not None:
        budget = settings.reasoning_budget
        effort = asked.effort or (settings.reasoning_effort if budget == UNLIMITED else None)
        if effort is not None and "reasoning_effort" not in state.served.chat_template:
            budget = EFFORT_TOKENS.get(effort)
    return None if budget == UNLIMITED else budget
