"""llama-server's text utilities, and those of its status paths that apply to this worker."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.chat_fields import ReasoningChatFields
from worker.api.chat.prompt import chat_prompt
from worker.api.chat.run import answered
from worker.api.chat.sampling import DRAWN_SEED
from worker.api.dialects.llama_server.completion import OPERATIONS as COMPLETIONS
from worker.api.dialects.llama_server.completion import settings_of
from worker.api.dialects.llama_server.rerank import OPERATIONS as RERANK
from worker.api.dialects.llama_server.running import OPERATIONS as RUNNING
from worker.api.dialects.llama_server.schema import (
    ERRORS,
    REFERENCE,
    AdaptersBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from worker.api.http.body import OpenBody, read, read_as
from worker.api.http.encoding import in_parts, json_answer
from worker.api.http.faults import refusal
from worker.api.http.headers import Described
from worker.api.http.operation import Dialect, Operation
from worker.api.http.state import AppState
from worker.errors import QueueFull, shortened
from worker.supervisor.status import Activity
from worker.wire.work import (
    MEDIA_MARKER,
    ApplyTemplate,
    ChatPrompt,
    Detokenize,
    InferenceRequest,
    Tokenize,
    Tokenized,
)

_WANTS_IDLE: dict[str, Described] = {
    "fail_on_no_slot": {
        "description": "any non-empty text: answer 503 if no slot is idle",
        "schema": {"type": "string"},
    }
}
_VALUES_OF_TOKEN = 4
"""JSON values per token, for its id and its piece, which may be a list of bytes."""


async def tokenize(request: Request, state: AppState) -> Response:
    body, chat = await read_as(request, state, TokenizeBody, partial(_tokenized, state=state))
    text = body.content or ""
    if chat is not None:
        text = await answered(request, state, ApplyTemplate(chat))
    work = Tokenize(
        text,
        # Without any text nothing is added, as in llama-server.
        add_special=chat is not None or (body.add_special and body.content is not None),
        parse_special=body.parse_special,
        with_pieces=body.with_pieces or body.return_token_strs,
    )
    tokens: Tokenized = await answered(request, state, work)
    ids = array("i", tokens.ids)
    paired = zip(ids, _pieces(tokens), strict=True)
    named = ({"id": id, "piece": _text_or_bytes(piece)} for id, piece in paired)
    whole: dict[str, Any] = {
        "tokens": named if body.with_pieces else ids,
        "count": len(ids),  # this and the next fields are vLLM's
        "max_model_len": state.supervisor.status().context_length,
    }
    if body.return_token_strs:
        whole["token_strs"] = (piece.decode(errors="replace") for piece in _pieces(tokens))
    return await json_answer(in_parts(whole), _VALUES_OF_TOKEN * len(ids))


def _tokenized(body: TokenizeBody, state: AppState) -> tuple[TokenizeBody, ChatPrompt | None]:
    if body.content is not None and body.messages:
        raise refusal("content", "conflict", "must not be combined with messages")
    return body, chat_prompt(body.reasoning_chat(), state) if body.messages else None


def _pieces(tokens: Tokenized) -> Iterator[bytes]:
    start = 0
    for n_bytes in array("i", tokens.sizes):
        yield tokens.pieces[start : start + n_bytes]
        start += n_bytes


def _text_or_bytes(piece: bytes) -> str | list[int]:
    """A token's text, or its bytes if it is only a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(request: Request, state: AppState) -> object:
    body = await read(request, state, DetokenizeBody)
    return {"content": await answered(request, state, Detokenize(body.tokens))}


async def apply_template(request: Request, state: AppState) -> object:
    prompt = await read_as(
        request,
        state,
        ReasoningChatFields,
        lambda body: chat_prompt(body.reasoning_chat(), state),
    )
    return {"prompt": await answered(request, state, ApplyTemplate(prompt))}


async def props(request: Request, state: AppState) -> object:
    status, info = state.supervisor.status(), state.loaded()
    silent = CompletionBody.model_validate({"prompt": ""})
    adapters = state.adapters.of(None, None)
    work = InferenceRequest("", "", silent.sampling(state), -1, adapters=adapters)
    params = settings_of(work, silent)
    # Requests may have the fields after the seed, but they have no effect.
    params |= {"seed": DRAWN_SEED, "n_keep": 0, "n_discard": 0, "backend_sampling": False}
    metadata = state.served.metadata
    for_tools = metadata.get("tokenizer.chat_template.tool_use")
    return {
        "default_generation_settings": {
            "n_ctx": status.context_length,
            "params": params,
        },
        "total_slots": status.slots,
        "model_alias": state.model_name,
        "model_ftype": info.model.quant_kind,
        "model_path": state.model_file,  # Local folders are not for clients.
        "chat_template": metadata.get("tokenizer.chat_template", ""),
        **({} if for_tools is None else {"chat_template_tool_use": for_tools}),
        "media_marker": MEDIA_MARKER,
        "modalities": {**state.served.modalities, "video": False},
        "bos_token": info.model.bos_token,
        "eos_token": info.model.eos_token,
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "ui": state.settings.page,
        "build_info": state.served.build,
        "is_sleeping": state.supervisor.state == "sleeping",
    }


def _of_models(answers: Sequence[Any]) -> Any:
    """With several models, reports a router, whose models the chat page lets its user choose."""
    several = {"role": "router"} if len(answers) > 1 else {}
    return {**next(iter(answers), {}), **several}


async def tools(request: Request, state: AppState) -> object:
    """An empty list; the chat page requests it before each message."""
    return []


class ToolBody(OpenBody):
    tool: str


async def call_tool(request: Request, state: AppState) -> object:
    """Fail in the form of a result, as the chat page expects: it calls a tool at its start."""
    body = await read(request, state, ToolBody)
    return {"error": shortened(f"this worker has no tool {body.tool!r}, nor any other")}


async def slots(request: Request, state: AppState) -> object:
    """One entry per slot. Which slot a request has is not known, so the first ones are busy.

    Raises:
        QueueFull: no slot is idle, and the request has `fail_on_no_slot`.
    """
    status = state.supervisor.status()
    running = state.supervisor.activities(0)
    if request.query_params.get("fail_on_no_slot") and len(running) >= status.slots:
        raise QueueFull("no slot is idle", retry_after_seconds=1)
    return [
        {
            "id": i,
            "n_ctx": status.context_length,
            "speculative": status.info is not None and status.info.speculation.kind != "off",
            "is_processing": i < len(running),
            **(_busy(running[i]) if i < len(running) else {}),
        }
        for i in range(status.slots)
    ]


async def adapters(request: Request, state: AppState) -> object:
    """The loaded adapters, each with its scale for requests that name none."""
    return [
        {
            "id": number,
            "name": adapter.name,
            "path": adapter.path.rstrip("/").rsplit("/", 1)[-1],
            "scale": scale,
            "task_name": "",
            "prompt_prefix": "",
        }
        for number, (adapter, scale) in enumerate(
            zip(state.adapters.loaded, state.adapters.scales, strict=True)
        )
    ]


async def set_adapters(request: Request, state: AppState) -> object:
    """Set these scales, and those of all other adapters to 0."""
    body = await read(request, state, AdaptersBody)
    state.adapters.set(body.lora)
    return {"success": True}


def _busy(activity: Activity) -> dict[str, Any]:
    return {
        "n_prompt_tokens": activity.prompt_tokens,
        "n_prompt_tokens_processed": activity.computed_tokens - activity.cached_tokens,
        "n_prompt_tokens_cache": activity.cached_tokens,
        "next_token": [{"has_next_token": True, "n_decoded": activity.tokens_out}],
    }


OPERATIONS = [
    Operation("POST", "/tokenize", tokenize, "Turn a text into token ids", body=TokenizeBody),
    Operation("POST", "/detokenize", detokenize, "Turn token ids into text", body=DetokenizeBody),
    Operation(
        "POST", "/apply-template", apply_template, "Apply the chat template to messages",
        body=ReasoningChatFields,
    ),
    Operation(
        "GET", "/props", props, "The model's properties and default settings",
        errors=(503,), asks="groups", joined=_of_models,
    ),
    Operation("GET", "/tools", tools, "An empty list: there are no tools"),
    Operation(
        "POST", "/tools", call_tool, "Fails: there are no tools", body=ToolBody, errors=(400, 413),
    ),
    Operation(
        "GET", "/slots", slots, "The slots and their state", errors=(503,), query=_WANTS_IDLE,
    ),
    Operation("GET", "/lora-adapters", adapters, "The loaded LoRA adapters"),
    Operation(
        "POST", "/lora-adapters", set_adapters, "Set the default scales of adapters",
        body=AdaptersBody, errors=(400, 413), asks="named",
    ),
]  # fmt: skip
DIALECT = Dialect(
    [*COMPLETIONS, *RERANK, *RUNNING, *OPERATIONS],
    ERRORS,
    reference=REFERENCE,
)
