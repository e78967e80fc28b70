"""From OpenAI's bodies to the worker's own requests: one for each prompt and choice.

What the tables cannot say (fields that depend on each other, on the vocabulary, on the model's
template) is checked here, still all at once. Runs on the API process's event loop.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from starlette.requests import Request

from worker.api.fields import Fault, check, fault
from worker.api.openai.json_grammar import compile_calls, compile_schema
from worker.api.openai.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    chat_schema,
    completion_schema,
)
from worker.api.openai.tools import ToolUse, forced_functions
from worker.api.requests import MAX_SEED, chat_prompt_of, deadline_of, invalid, read_json, seed_of
from worker.api.state import AppState
from worker.errors import WorkerError
from worker.messages import ChatPrompt, InferenceRequest, Sampling

Body = Mapping[str, Any]


class ModelNotFound(WorkerError):
    code: ClassVar[str] = "MODEL_NOT_FOUND"
    status: ClassVar[int] = 404


@dataclass(frozen=True, slots=True)
class Ask:
    """A whole OpenAI request: its jobs and the form of its answer."""

    id: str
    created: int
    jobs: tuple[InferenceRequest, ...]
    """Choice i is job i; `n` choices for the first prompt, then for the next."""
    choices_per_prompt: int
    stream: bool
    include_usage: bool
    top_logprobs: int | None
    tools: ToolUse | None = None


async def read_chat(request: Request, state: AppState) -> Ask:
    deadline = deadline_of(request)
    body = await read_json(request, state)
    settings, vocab_size = state.settings, _vocab_size(state)
    faults = check(body, chat_schema(settings.max_tokens_out, vocab_size))
    faults += [] if faults else _chat_faults(body, vocab_size)
    if faults:
        raise invalid(faults)
    require_model(body, state)
    body = {name: value for name, value in body.items() if value is not None}
    top_logprobs = int(body.get("top_logprobs", 0)) if body.get("logprobs") else None
    prompt = chat_prompt_of(
        body if body.get("tool_choice") != "none" else {**body, "tools": None}, state
    )
    prompt = replace(prompt, template_kwargs=body.get("chat_template_kwargs"))
    tools = ToolUse.of(prompt.tools, body)
    grammar, faults = _grammar(body, tools)
    if faults:
        raise invalid(faults)
    sampling = replace(_sampling(body, top_logprobs), grammar=grammar)
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens", settings.max_tokens_out))
    ask = _ask(body, "chatcmpl", [prompt], sampling, int(max_tokens), deadline)
    return replace(ask, top_logprobs=top_logprobs, tools=tools)


async def read_completion(request: Request, state: AppState) -> Ask:
    deadline = deadline_of(request)
    body = await read_json(request, state)
    settings, vocab_size = state.settings, _vocab_size(state)
    schema = completion_schema(settings.max_tokens_out, settings.max_prompt_chars, vocab_size)
    faults = check(body, schema)
    faults += [] if faults else _common_faults(body, vocab_size)
    if faults:
        raise invalid(faults)
    require_model(body, state)
    body = {name: value for name, value in body.items() if value is not None}
    top_logprobs = int(body["logprobs"]) if "logprobs" in body else None
    default = min(DEFAULT_COMPLETION_TOKENS, settings.max_tokens_out)
    ask = _ask(
        body,
        "cmpl",
        inputs_of(body["prompt"]),
        _sampling(body, top_logprobs),
        int(body.get("max_tokens", default)),
        deadline,
    )
    return replace(ask, top_logprobs=top_logprobs)


def require_model(body: Body, state: AppState) -> None:
    """A name that is not ours is refused: no model stands in for another one."""
    name = body.get("model")
    if name is not None and name not in state.model_names:
        ours = state.model_names[-1]
        raise ModelNotFound(
            f"model: this worker serves {ours!r} and no other",
            errors=[fault("model", "unknown", f"model must be {ours!r}")],
        )


def inputs_of(given: Any) -> list[str | tuple[int, ...]]:
    """A text, token ids, or a list of either, as a list."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], str):
        return list(given)
    if isinstance(given[0], list):
        return [tuple(int(token) for token in ids) for ids in given]
    return [tuple(int(token) for token in given)]


# --- parts -------------------------------------------------------------------------------


def _vocab_size(state: AppState) -> int:
    info = state.supervisor.info
    return info.model.vocab_size if info is not None else 2**31 - 1


def _chat_faults(body: Body, vocab_size: int) -> list[Fault]:
    faults = _common_faults(body, vocab_size)
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        faults.append(fault("top_logprobs", "requires", "top_logprobs needs logprobs: true"))
    both = (body.get("max_tokens"), body.get("max_completion_tokens"))
    if None not in both and both[0] != both[1]:
        message = "max_completion_tokens and max_tokens say different things; give one of them"
        faults.append(fault("max_completion_tokens", "conflict", message))
    choice, tools = body.get("tool_choice"), body.get("tools")
    if choice not in (None, "none") and not tools:
        faults.append(fault("tool_choice", "requires", "tool_choice needs tools to choose from"))
    if isinstance(choice, Mapping) and tools:
        name = choice["function"]["name"]
        if name not in [tool["function"]["name"] for tool in tools]:
            message = "tool_choice.function.name must be the name of one of the tools"
            faults.append(fault("tool_choice.function.name", "enum", message))
    forced = isinstance(choice, Mapping) or choice == "required"
    if forced and (body.get("response_format") or {}).get("type", "text") != "text":
        message = "response_format cannot be honoured together with a forced tool call"
        faults.append(fault("response_format", "conflict", message))
    return faults


def _common_faults(body: Body, vocab_size: int) -> list[Fault]:
    faults = []
    for token in body.get("logit_bias") or {}:
        if (
            not (token.isascii() and token.isdigit() and len(token) < 12)
            or int(token) >= vocab_size
        ):
            message = f"the keys of logit_bias must be token ids from 0 to {vocab_size - 1}"
            faults.append(fault("logit_bias", "propertyNames", message))
            break
    if body.get("stream_options") is not None and not body.get("stream"):
        faults.append(fault("stream_options", "requires", "stream_options needs stream: true"))
    return faults


def _sampling(body: Body, top_logprobs: int | None) -> Sampling:
    bias = body.get("logit_bias", {})
    return Sampling(
        seed=seed_of(body) & MAX_SEED,
        temperature=float(body.get("temperature", 1.0)),
        top_p=float(body.get("top_p", 1.0)),
        top_k=int(body.get("top_k", 0)),
        min_p=float(body.get("min_p", 0.0)),
        repetition_penalty=float(body.get("repetition_penalty", 1.0)),
        frequency_penalty=float(body.get("frequency_penalty", 0.0)),
        presence_penalty=float(body.get("presence_penalty", 0.0)),
        logit_bias=tuple((int(token), float(added)) for token, added in bias.items()),
        logprobs=top_logprobs,
        ignore_eos=body.get("ignore_eos", False),
    )


def _grammar(body: Body, tools: ToolUse | None) -> tuple[str | None, list[Fault]]:
    """What the answer has to follow, and what of it could not be kept."""
    if tools is not None and tools.forced is not None:
        return compile_calls(forced_functions(body["tools"], tools.forced))
    form = body.get("response_format", {"type": "text"})
    if form["type"] == "json_object":
        return compile_schema({"type": "object"}, "response_format")
    if form["type"] == "json_schema":
        schema = form["json_schema"]["schema"]
        return compile_schema(schema, "response_format.json_schema.schema")
    return None, []


def _ask(
    body: Body,
    prefix: str,
    prompts: list[Any],
    sampling: Sampling,
    max_tokens: int,
    deadline: float | None,
) -> Ask:
    ask_id = f"{prefix}-{uuid.uuid4().hex}"
    stop = body.get("stop", ())
    salt = [f"{name}={body[name]}" for name in ("prompt_cache_key", "user") if name in body]
    n = int(body.get("n", 1))
    jobs: list[InferenceRequest] = []
    for prompt in prompts:
        assert isinstance(prompt, str | tuple | ChatPrompt)
        for choice in range(n):
            jobs.append(
                InferenceRequest(
                    job_id=f"{ask_id}-{len(jobs)}" if jobs else ask_id,
                    prompt=prompt,
                    # Each choice has a seed of its own, or they would all be one text.
                    sampling=replace(sampling, seed=(sampling.seed + choice) & MAX_SEED),
                    max_tokens=max_tokens,
                    stop=(stop,) if isinstance(stop, str) else tuple(stop),
                    cache_salt=" ".join(salt) or None,
                    deterministic=body.get("deterministic", False),
                    deadline=deadline,
                )
            )
    return Ask(
        id=ask_id,
        created=int(time.time()),
        jobs=tuple(jobs),
        choices_per_prompt=n,
        stream=body.get("stream", False),
        include_usage=body.get("stream_options", {}).get("include_usage", False),
        top_logprobs=None,
    )
