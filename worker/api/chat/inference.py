"""Turns a request into requests to the engine, one for each choice of each prompt.

Checks what depends on the served model, for all dialects. Pure functions, any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from worker.api.chat.constrain.constrain import constrain
from worker.api.chat.parse.calls import ToolUse
from worker.api.chat.parse.conventions import conventions_of
from worker.api.chat.parse.parser import AnswerParser
from worker.api.chat.prompt import chat_prompt
from worker.api.chat.reasoning import UNLIMITED, reasoning_of
from worker.api.chat.request import Chat, ForcedCalls, Format, Generate, JsonSchema, OneTool
from worker.api.chat.sampling import MAX_SEED
from worker.api.http.faults import fault, invalid
from worker.api.http.state import AppState
from worker.observability.logs import digest
from worker.wire.adapters import Applied
from worker.wire.sampling import Sampling
from worker.wire.work import InferenceRequest, Prompt


@dataclass(frozen=True, slots=True)
class Inference:
    requests: tuple[InferenceRequest, ...]
    """First the choices of the first prompt, then those of the next."""
    digests: tuple[str, ...]
    """A digest of each prompt, for logs."""
    not_enforced: tuple[str, ...]
    """Paths of schema keywords that are not enforced, and of fields that have no effect."""
    parser_of: Callable[[str], AnswerParser] | None = None
    """Makes the parser of a choice from the end of its prompt; `None`: the text is not parsed."""


def inference_of(asked: Generate, state: AppState, deadline: float | None) -> Inference:
    """
    Raises:
        ModelNotFound: the model's name is not one that this worker answers to.
        InvalidRequest: this model cannot serve it, or this worker can never run it.
    """
    adapters = state.adapters.of(asked.model, asked.adapters)
    form: Format | ForcedCalls | None = next(iter(asked.formats), None)
    others = asked.formats[1:]
    prompts, sampling = asked.input, asked.sampling
    shown: tuple[str, ...] = ()
    not_enforced: tuple[str, ...] = ()
    served = state.served
    conventions = conventions_of(served.chat_template, takes_tools=served.template_takes_tools)
    wish, splits, parser_of = asked.reasoning, False, None
    budget = None if wish.budget == UNLIMITED else wish.budget
    use: ToolUse | None = None
    goes_on = False
    if isinstance(prompts, Chat):
        chat, prompt = prompts, chat_prompt(prompts, state)
        _, _, budget = reasoning_of(chat, state)
        prompts, wish = (prompt,), chat.reasoning
        splits = state.settings.reasoning != "none" if wish.splits is None else wish.splits
        if chat.tools and chat.tool_choice != "none":
            use = _tool_use(chat, form)
        if use is not None and use.forced:
            # A forced call leaves no text, so the forms of the answer's text have no effect.
            only = chat.tool_choice.name if isinstance(chat.tool_choice, OneTool) else None
            tools = tuple(tool for tool in chat.tools if only in (None, tool.name))
            several = chat.tool_choice == "required" and chat.parallel_tool_calls is True
            form, others = ForcedCalls(tools, several), asked.formats
        elif use is not None and isinstance(form, JsonSchema):
            form = JsonSchema(form.schema, form.path, form.strict, calls=chat.tools)
        shown = conventions.shown_tokens[use is not None, splits]
        goes_on = prompt.reasoning_marks is not None
        parser_of = partial(
            AnswerParser,
            conventions,
            use,
            splits_reasoning=splits,
            goes_on=goes_on,
            has_form=form is not None,
        )
    if form is not None:
        constraint, not_enforced, resembles = constrain(form, strict=state.settings.strict)
        if resembles and parser_of is not None:
            parser_of = partial(parser_of, resembles_calls=True)
        if use is not None and not use.is_json:
            # The form holds for the whole answer, so the model cannot write a call.
            not_enforced = (*not_enforced, "tools")
        if splits and not conventions.calls.always_framed:
            constraint = replace(constraint, follows_reasoning=True)
        sampling = replace(sampling, constraint=constraint)
    not_enforced += tuple(each.path.removesuffix(".schema") for each in others)
    message = state.settings.reasoning_budget_message if wish.message is None else wish.message
    reasoning = replace(conventions.reasoning, budget=budget, message=message, goes_on=goes_on)
    sampling = replace(sampling, reasoning=reasoning)
    requests = _requests(asked, prompts, sampling, shown, adapters, state, deadline)
    return Inference(requests, tuple(map(digest, prompts)), not_enforced, parser_of)


def _tool_use(chat: Chat, form: Format | ForcedCalls | None) -> ToolUse:
    forced = chat.tool_choice == "required" or isinstance(chat.tool_choice, OneTool)
    return ToolUse(
        forced,
        chat.parallel_tool_calls is not False,
        {tool.name: tool for tool in chat.tools},
        is_json=forced or isinstance(form, JsonSchema),
    )


def _requests(
    asked: Generate,
    prompts: tuple[Prompt, ...],
    sampling: Sampling,
    shown_tokens: tuple[str, ...],
    adapters: Applied,
    state: AppState,
    deadline: float | None,
) -> tuple[InferenceRequest, ...]:
    limit = state.served.max_tokens_out
    most = state.settings.engine.slots + state.settings.max_queued_requests
    if (n_wanted := len(prompts) * asked.n) > most:
        message = (
            f"{len(prompts)} prompts with {asked.n} choices each are {n_wanted} requests; this "
            f"worker runs and queues at most {most}"
        )
        name, value = ("n", asked.n) if asked.n > 1 else ("prompt", len(prompts))
        raise invalid([fault(name, "maximum", message, value)])
    return tuple(
        InferenceRequest(
            job_id=f"{asked.id}-{index}" if index else asked.id,
            prompt=prompts[index // asked.n],
            field=f"prompt[{index // asked.n}]" if len(prompts) > 1 else "prompt",
            # Each choice has a seed of its own; otherwise all would have the same text.
            sampling=replace(sampling, seed=(sampling.seed + index % asked.n) & MAX_SEED)
            if index % asked.n
            else sampling,
            max_tokens=limit if asked.max_tokens is None else min(asked.max_tokens, limit),
            stop=asked.stop,
            lines=asked.lines,
            prompt_logprobs=asked.prompt_logprobs,
            scores_end=asked.scores_end,
            shown_tokens=shown_tokens,
            reports_progress=asked.reports_progress,
            cache_salt=asked.salt,
            adapters=adapters,
            deterministic=asked.deterministic,
            deadline=deadline,
        )
        for index in range(n_wanted)
    )
