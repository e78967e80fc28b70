"""What a request becomes for the engine: a job for each prompt and choice, and how to read them.

Checks what depends on the served model, whatever dialect asked. Pure functions, any thread.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from worker.api.chat.constrain.constrain import Constrained, constrain
from worker.api.chat.format import ForcedCalls, ForcedFunction, Format
from worker.api.chat.parse.answer import AnswerParser
from worker.api.chat.parse.calls import ToolUse
from worker.api.chat.parse.conventions import conventions_of
from worker.api.chat.prompt import chat_prompt
from worker.api.chat.request import Chat, Generate, OneTool
from worker.api.chat.sampling import MAX_SEED
from worker.api.http.faults import fault, invalid
from worker.api.http.state import AppState
from worker.observability.logs import digest
from worker.wire.work import ChatPrompt, Constraint, InferenceRequest, InfillPrompt, Prompt


@dataclass(frozen=True, slots=True)
class Inference:
    requests: tuple[InferenceRequest, ...]
    """First the choices of the first prompt, then those of the next."""
    digests: tuple[str, ...]
    """Of the requests' prompts, for logs."""
    not_enforced: tuple[str, ...]
    """Paths of schema keywords that are not enforced."""
    parser_of: Callable[[str], AnswerParser] | None = None
    """Makes the parser of a choice from the end of its prompt; `None`: the text is not parsed."""


def inference_of(asked: Generate, state: AppState, deadline: float | None) -> Inference:
    """
    Raises:
        ModelNotFound: the model's name is not one that this worker answers to.
        InvalidRequest: this model cannot do it, or this worker can never run it.
    """
    state.require_model(asked.model)
    if not isinstance(asked.input, Chat):
        constraint, not_enforced = _constrained(asked.format, state)
        requests = _requests(asked, asked.input, constraint, (), state, deadline)
        return Inference(requests, _digests(requests, asked.n), not_enforced)
    chat, splits = asked.input, state.settings.reasoning == "auto"
    conventions, use = conventions_of(state.served.chat_template), _tool_use(chat)
    constraint, not_enforced = _constrained(_forced_calls(chat, use) or asked.format, state)
    if constraint is not None and splits:
        constraint = replace(constraint, reasoning=conventions.reasoning)
    shown = conventions.tokens(calls=use is not None, reasoning=splits)
    prompts = (chat_prompt(chat, state),)
    requests = _requests(asked, prompts, constraint, shown, state, deadline)
    parser_of = partial(AnswerParser, conventions, use, splits_reasoning=splits)
    return Inference(requests, _digests(requests, asked.n), not_enforced, parser_of)


def _digests(requests: tuple[InferenceRequest, ...], n: int) -> tuple[str, ...]:
    """One for each request; those of a prompt with `n` choices are one. They take milliseconds."""
    return tuple(name for each in requests[::n] for name in [digest_of(each.prompt)] * n)


def digest_of(prompt: Prompt) -> str:
    """The SHA-256 that names a prompt in logs."""
    match prompt:
        case str():
            return digest(prompt)
        case tuple():
            return digest(array("i", prompt).tobytes())
        case ChatPrompt(messages):
            fields = (field for message in messages for field in message.items())
            return digest("\0".join(part for field in fields for part in map(_text_of, field)))
        case InfillPrompt():
            return digest(repr(prompt))


def _text_of(value: object) -> str:
    """A text as it is: to quote one of megabytes holds all threads up."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _tool_use(chat: Chat) -> ToolUse | None:
    choice, names = chat.tool_choice, {tool.name for tool in chat.tools}
    if not names and (choice == "required" or isinstance(choice, OneTool)):
        message = "tool_choice needs tools to choose from"
        raise invalid([fault("tool_choice", "requires", message)])
    if isinstance(choice, OneTool) and choice.name not in names:
        message = f"{choice.path} must be the name of one of the tools"
        raise invalid([fault(choice.path, "enum", message)])
    if not names or choice == "none":
        return None
    forced = choice.name if isinstance(choice, OneTool) else None
    return ToolUse(
        forced or ("*" if choice == "required" else None),
        chat.parallel_tool_calls is not False,
        {tool.name: tool.parameters for tool in chat.tools},
    )


def _forced_calls(chat: Chat, use: ToolUse | None) -> ForcedCalls | None:
    """The form of the answer where a call is forced. It leaves no text, so a form of the answer's
    text has no effect beside it."""
    if use is None or use.forced is None:
        return None
    forced = (
        ForcedFunction(tool.name, tool.parameters, tool.path)
        for tool in chat.tools
        if use.forced in ("*", tool.name)
    )
    several = chat.tool_choice == "required" and chat.parallel_tool_calls is True
    return ForcedCalls(tuple(forced), several)


def _constrained(
    asked: Format | None, state: AppState
) -> Constrained | tuple[Constraint | None, tuple[str, ...]]:
    return (None, ()) if asked is None else constrain(asked, strict=state.settings.strict)


def _requests(
    asked: Generate,
    prompts: tuple[Prompt, ...],
    constraint: Constraint | None,
    shown_tokens: tuple[str, ...],
    state: AppState,
    deadline: float | None,
) -> tuple[InferenceRequest, ...]:
    limit, sampling = state.served.max_tokens_out, asked.sampling
    if constraint is not None:
        sampling = replace(sampling, constraint=constraint)
    most = state.settings.engine.slots + state.settings.max_queued_requests
    if (n_wanted := len(prompts) * asked.n) > most:
        message = (
            f"{len(prompts)} prompts with {asked.n} choices each are {n_wanted} requests; this "
            f"worker runs and queues at most {most}"
        )
        raise invalid([fault("n", "maximum", message, asked.n)])
    return tuple(
        InferenceRequest(
            job_id=f"{asked.id}-{index}" if index else asked.id,
            prompt=prompts[index // asked.n],
            # Each choice has a seed of its own; otherwise all would have the same text.
            sampling=replace(sampling, seed=(sampling.seed + index % asked.n) & MAX_SEED)
            if index % asked.n
            else sampling,
            max_tokens=limit if asked.max_tokens is None else min(asked.max_tokens, limit),
            stop=asked.stop,
            prompt_logprobs=asked.prompt_logprobs,
            shown_tokens=shown_tokens,
            reports_progress=asked.reports_progress,
            cache_salt=asked.salt,
            deterministic=asked.deterministic,
            deadline=deadline,
        )
        for index in range(n_wanted)
    )
