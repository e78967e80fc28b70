"""Translates OpenAI's bodies into the engine's requests: one for each prompt and choice.

Checks here what the models cannot express: fields that depend on each other or on the served model.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pydantic_core

from worker.api.chat.constrain.constrain import Constrained, constrain
from worker.api.chat.delta import Parser
from worker.api.chat.format import (
    Choices,
    Expression,
    ForcedCalls,
    ForcedFunction,
    Format,
    Grammar,
    JsonSchema,
)
from worker.api.chat.output import Output
from worker.api.chat.parse.answer import AnswerParser, conventions_of
from worker.api.chat.parse.calls import ToolUse
from worker.api.chat.prompt import chat_prompt
from worker.api.chat.sampling import MAX_SEED, sampling_of
from worker.api.dialects.openai.schema import (
    DEFAULT_COMPLETION_TOKENS,
    ChatBody,
    CompletionBody,
    FunctionChoice,
    GenerationBody,
    StructuredOutputs,
    inputs_of,
)
from worker.api.http.body import JsonObject
from worker.api.http.faults import Fault, fault, invalid
from worker.api.http.state import AppState
from worker.supervisor.job import Job
from worker.wire.work import InferenceRequest, InfillPrompt, Prompt

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole request: the requests of its jobs and the form of its answer."""

    id: str
    created: int
    body: GenerationBody
    requests: tuple[InferenceRequest, ...]
    """Choice i is request i: first the `n` choices of the first prompt, then those of the next."""
    top_logprobs: int | None
    not_enforced: tuple[str, ...]
    """Paths of schema keywords that are not enforced."""
    parser_of: Callable[[str], Parser] | None = None
    """Makes the parser of a choice from the end of its prompt."""
    shows_prompt_logprobs: bool = False
    """Whether the answer carries the prompt's log-probabilities in vLLM's form."""
    echo: tuple[str, ...] = ()
    """The text that the answers of each prompt begin with."""

    def outputs(self, jobs: Sequence[Job]) -> list[Output]:
        return [Output(job, self.parser_of) for job in jobs]


def chat_generation(
    body: ChatBody, state: AppState, deadline: float | None, prefix: str = "chatcmpl-"
) -> Generation:
    """
    Raises:
        InvalidRequest: the fields do not fit together, or not with this model.
        ModelNotFound: the model's name is not one that this worker answers to.
    """
    state.require_model(body.model)
    if faults := _chat_faults(body):
        raise invalid(faults)
    prompt = chat_prompt(body, state, tools=body.tool_choice != "none")
    tools = _tool_use(body)
    conventions, splits = conventions_of(state.chat_template), state.settings.reasoning == "auto"
    constrained = _constrained(_format_of(body, tools), state)
    if constrained is not None and splits:
        constraint = replace(constrained.constraint, reasoning=conventions.reasoning)
        constrained = Constrained(constraint, constrained.not_enforced)
    generation = _generation(
        body,
        prefix,
        [prompt],
        constrained,
        state,
        deadline,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        shown_tokens=conventions.tokens(calls=tools is not None, reasoning=splits),
    )
    parser_of = partial(AnswerParser, conventions, tools, splits_reasoning=splits)
    return replace(generation, parser_of=parser_of)


def completion_generation(
    body: CompletionBody, state: AppState, deadline: float | None
) -> Generation:
    state.require_model(body.model)
    if body.max_tokens is None:
        body = body.model_copy(update={"max_tokens": DEFAULT_COMPLETION_TOKENS})
    prompts = [_with_suffix(prompt, body.suffix) for prompt in inputs_of(body.prompt)]
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    n_alternatives = max((n for n in wanted if n is not None), default=None)
    generation = text_generation(
        body, prompts, state, deadline, logprobs=body.logprobs, prompt_logprobs=n_alternatives
    )
    return replace(generation, shows_prompt_logprobs=body.prompt_logprobs is not None)


def text_generation(
    body: GenerationBody,
    prompts: Sequence[Prompt],
    state: AppState,
    deadline: float | None,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> Generation:
    """A generation from raw prompts, without a chat template."""
    return _generation(
        body,
        "cmpl-",
        prompts,
        _constrained(requested_format(body), state),
        state,
        deadline,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _with_suffix(prompt: str | tuple[int, ...], suffix: str | None) -> Prompt:
    if not suffix:
        return prompt
    if isinstance(prompt, tuple):
        message = "suffix goes with a prompt of text only"
        raise invalid([fault("suffix", "conflict", message)])
    return InfillPrompt(prompt, suffix)


def _chat_faults(body: ChatBody) -> list[Fault]:
    faults: list[Fault] = []
    if body.max_tokens == 0:
        message = "max_tokens must be an integer of at least 1, or -1"
        faults.append(fault("max_tokens", "minimum", message, 0))
    if body.top_logprobs is not None and not body.logprobs:
        faults.append(fault("top_logprobs", "requires", "top_logprobs needs logprobs: true"))
    choice = body.tool_choice
    if (choice == "required" or isinstance(choice, FunctionChoice)) and not body.tools:
        faults.append(fault("tool_choice", "requires", "tool_choice needs tools to choose from"))
    elif isinstance(choice, FunctionChoice):
        if choice.function.name not in {tool.function.name for tool in body.tools}:
            message = "tool_choice.function.name must be the name of one of the tools"
            faults.append(fault("tool_choice.function.name", "enum", message))
    form = body.response_format
    if form is not None and form.type == "json_schema" and not (form.json_schema or form.schema_):
        message = "response_format.json_schema is required: an object with a schema"
        faults.append(fault("response_format.json_schema", "required", message))
    return faults


def _tool_use(body: ChatBody) -> ToolUse | None:
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return None
    forced = choice.function.name if isinstance(choice, FunctionChoice) else None
    return ToolUse.of(
        [tool.for_template() for tool in body.tools],
        forced or ("*" if choice == "required" else None),
        parallel=body.parallel_tool_calls is not False,
    )


def _format_of(body: ChatBody, tools: ToolUse | None) -> Format | None:
    """The form of the answer: a forced call, else what the body's own fields ask for.

    A forced call leaves no text, so a form of the answer's text is ignored beside it.
    """
    if tools is not None and tools.forced is not None:
        several = body.tool_choice == "required" and body.parallel_tool_calls is True
        forced = (
            ForcedFunction(f.name, f.parameters, f"tools[{index}].function.parameters")
            for index, f in enumerate(tool.function for tool in body.tools)
            if tools.forced in ("*", f.name)
        )
        return ForcedCalls(tuple(forced), several)
    form = body.response_format
    if form is None or form.type == "text":
        return requested_format(body)
    if form.json_schema is not None:
        path, strict = "response_format.json_schema.schema", form.json_schema.strict is True
        return JsonSchema(form.json_schema.schema_, path, strict)
    if form.schema_ is not None:
        return JsonSchema(form.schema_, "response_format.schema")
    return JsonSchema(_ANY_OBJECT, "response_format")


def requested_format(body: GenerationBody) -> Format | None:
    """The form in one of llama.cpp's and vLLM's fields; the first that is given wins."""
    given = body.structured_outputs or StructuredOutputs.model_validate({})
    prefix = "structured_outputs."
    fields: tuple[tuple[str, Any, Callable[[Any, str], Format]], ...] = (
        ("json_schema", body.json_schema, _json_schema),
        ("guided_json", body.guided_json, _json_schema),
        (prefix + "json", given.json_, _json_schema),
        ("guided_regex", body.guided_regex, Expression),
        (prefix + "regex", given.regex, Expression),
        ("guided_choice", body.guided_choice or None, Choices),
        (prefix + "choice", given.choice or None, Choices),
        ("grammar", body.grammar or None, Grammar),
        ("guided_grammar", body.guided_grammar or None, Grammar),
        (prefix + "grammar", given.grammar or None, Grammar),
        (prefix + "json_object", _ANY_OBJECT if given.json_object else None, _json_schema),
    )
    asked = (made(value, path) for path, value, made in fields if value is not None)
    return next(asked, None)


def _json_schema(given: str | JsonObject, path: str) -> JsonSchema:
    """JSON under a schema; clients also send schemas as text."""
    schema: object = given
    if isinstance(given, str):
        try:
            schema = pydantic_core.from_json(given, allow_inf_nan=False)
        except ValueError:
            raise invalid([fault(path, "json", f"{path} must be a JSON schema")]) from None
    return JsonSchema(schema, path)


def _constrained(asked: Format | None, state: AppState) -> Constrained | None:
    return None if asked is None else constrain(asked, strict=state.settings.strict)


def _generation(
    body: GenerationBody,
    prefix: str,
    prompts: Sequence[Prompt],
    constrained: Constrained | None,
    state: AppState,
    deadline: float | None,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    shown_tokens: tuple[str, ...] = (),
) -> Generation:
    id = f"{prefix}{uuid.uuid4().hex}"
    constraint, not_enforced = constrained or (None, ())
    sampling = sampling_of(body, state, constraint=constraint, logprobs=logprobs)
    limit, wanted = state.max_tokens_out, body.max_tokens
    requests: list[InferenceRequest] = []
    for prompt in prompts:
        for choice in range(body.n):
            requests.append(
                InferenceRequest(
                    job_id=f"{id}-{len(requests)}" if requests else id,
                    prompt=prompt,
                    # Each choice has a seed of its own; otherwise all would have the same text.
                    sampling=replace(sampling, seed=(sampling.seed + choice) & MAX_SEED),
                    max_tokens=limit if wanted is None or wanted < 0 else min(wanted, limit),
                    stop=body.stops,
                    prompt_logprobs=prompt_logprobs,
                    shown_tokens=shown_tokens,
                    reports_progress=body.return_progress and body.stream,
                    cache_salt=body.salt,
                    deterministic=body.deterministic,
                    deadline=deadline,
                )
            )
    return Generation(id, int(time.time()), body, tuple(requests), logprobs, not_enforced)
