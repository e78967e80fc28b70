"""llama-server's own paths that generate: `/completion` and `/infill`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from worker.api.chat.delta import Text
from worker.api.chat.output import Output
from worker.api.chat.run import Answer, respond
from worker.api.dialects.llama_server.rerank import OPERATIONS as RERANK
from worker.api.dialects.llama_server.schema import (
    Chosen,
    Completion,
    InfillBody,
    NativeBody,
    NativeCompletionBody,
)
from worker.api.dialects.openai.generation import text_generation
from worker.api.dialects.openai.logprobs import native_logprobs
from worker.api.dialects.openai.schema import inputs_of
from worker.api.http.body import deadline_of, read
from worker.api.http.encoding import dumps
from worker.api.http.errors import NESTED, error_object
from worker.api.http.operation import (
    JSON,
    MODEL_ERRORS,
    SSE,
    Dialect,
    Events,
    Operation,
    StreamForm,
)
from worker.api.http.state import state_of
from worker.errors import WorkerError
from worker.supervisor.job import StreamEvent
from worker.wire.messages import Finished, PromptProgress, Started, Token, TokenLogprob
from worker.wire.work import InferenceRequest, InfillPrompt, Prompt

_STOP_TYPES = {"EOS": "eos", "MAX_TOKENS": "limit", "STOP_SEQUENCE": "word"}


async def completion(request: Request) -> Response:
    body = await read(request, state_of(request), NativeCompletionBody)
    return await _answer(request, body, inputs_of(body.prompt))


async def infill(request: Request) -> Response:
    body = await read(request, state_of(request), InfillBody)
    prompt = InfillPrompt(
        body.input_prefix + body.prompt,
        body.input_suffix,
        tuple((file.filename, file.text) for file in body.input_extra),
        ("input_prefix", "input_suffix"),
    )
    return await _answer(request, body, [prompt])


async def _answer(request: Request, body: NativeBody, prompts: Sequence[Prompt]) -> Response:
    state = state_of(request)
    state.require_model(body.model)
    # Clients that send every field write 0 for "off".
    logprobs = body.n_probs or None
    generation = text_generation(body, prompts, state, deadline_of(request), logprobs=logprobs)

    def answer(outputs: Sequence[Output]) -> NativeAnswers:
        choices = enumerate(zip(outputs, generation.requests, strict=True))
        return NativeAnswers(
            [NativeAnswer(index, state.model_name, *choice, body) for index, choice in choices]
        )

    return await respond(request, generation, answer)


class NativeAnswer:
    """The answer of one choice in llama-server's form."""

    def __init__(
        self, index: int, model: str, output: Output, asked: InferenceRequest, body: NativeBody
    ) -> None:
        self._index, self._model, self._output = index, model, output
        self._asked, self._body = asked, body
        self._tokens: list[int] = []

    def take(self, event: StreamEvent) -> dict[str, Any] | None:
        """The chunk of a stream for one event; `None` if it adds nothing."""
        pieces = self._output.take(event)
        match event:
            case Token(_, _, ids, logprobs):
                self._tokens += ids
                text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
                return self._part(text, list(ids), logprobs)
            case Started() | PromptProgress() if self._asked.reports_progress:
                return self._part("", [], ()) | {"prompt_progress": self._output.prompt_progress}
            case Finished():
                return self.whole(streamed=True)
        return None

    def _part(self, text: str, ids: list[int], logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        job = self._output.job
        part: dict[str, Any] = {
            "index": self._index,
            "content": text,
            "tokens": ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(self._tokens),
            "tokens_evaluated": job.prompt_tokens,
        }
        if self._body.timings_per_token:
            part["timings"] = self._output.timings
        if logprobs:
            part["completion_probabilities"] = native_logprobs(logprobs)
        return part

    def whole(self, *, streamed: bool = False) -> dict[str, Any]:
        """The last object of a stream, or the whole answer."""
        output = self._output
        job, finished = output.job, output.finished
        assert finished is not None
        shows_tokens = self._body.return_tokens and not streamed
        answer: dict[str, Any] = {
            "index": self._index,
            "content": "" if streamed else output.message.text,
            "tokens": self._tokens if shows_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": finished.tokens_out,
            "tokens_evaluated": job.prompt_tokens,
            "tokens_cached": job.prompt_tokens + finished.tokens_out,
            "generation_settings": _settings(self._asked, self._body),
            "has_new_line": "\n" in output.message.text,
            "truncated": False,
            "stop_type": _STOP_TYPES[finished.stop_reason],
            "stopping_word": finished.stop_sequence or "",
            "timings": output.timings,
        }
        if isinstance(self._asked.prompt, str | tuple):
            answer["prompt"] = self._asked.prompt
        if output.message.logprobs and not streamed:
            answer["completion_probabilities"] = native_logprobs(output.message.logprobs)
        return _only(self._body.response_fields, answer)


class NativeAnswers(Answer):
    """The answers of all choices of one request."""

    def __init__(self, answers: Sequence[NativeAnswer]) -> None:
        self._answers = answers

    def take(self, index: int, event: StreamEvent) -> None:
        self._answers[index].take(event)

    def whole(self) -> Any:
        whole = [each.whole() for each in self._answers]
        return whole if len(whole) > 1 else whole[0]

    def parts(self, index: int, event: StreamEvent) -> Iterator[bytes]:
        if (part := self._answers[index].take(event)) is not None:
            yield f"data: {dumps(part)}\n\n".encode()

    def failure(self, error: WorkerError) -> bytes:
        return _failure(error)


def _failure(error: WorkerError) -> bytes:
    """The last event of a stream that failed."""
    return f"data: {dumps({'error': error_object(error)})}\n\n".encode()


def _settings(request: InferenceRequest, body: NativeBody) -> dict[str, Any]:
    """What the answer was really sampled with, under llama-server's names."""
    sampling = request.sampling
    return {
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": request.stop,
        "max_tokens": request.max_tokens,
        "n_predict": request.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in sampling.logit_bias],
        "n_probs": sampling.logprobs or 0,
        "stream": body.stream,
        "timings_per_token": body.timings_per_token,
    }


def _only(paths: Sequence[str], answer: dict[str, Any]) -> dict[str, Any]:
    """The answer's values at these paths; all of it without any. A path that leads nowhere is left
    out, as llama-server does."""
    if not paths:
        return answer
    found: dict[str, Any] = {}
    for path in paths:
        value: Any = answer
        for key in path.split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[path] = value
    return found


OPERATIONS = [
    Operation(
        "POST", "/completion", completion, "llama-server's completions",
        {JSON: Completion | Chosen | list[Completion | Chosen], SSE: Events},
        body=NativeCompletionBody, errors=MODEL_ERRORS,
    ),
    Operation(
        "POST", "/infill", infill, "The text in a gap", {JSON: Completion | Chosen, SSE: Events},
        body=InfillBody, errors=MODEL_ERRORS,
    ),
]  # fmt: skip
STREAM = StreamForm(
    lambda event: b'"stop":true' in event or event.startswith(b'data: {"error":'),
    lambda error, first, last: _failure(error),
)
DIALECT = Dialect([*OPERATIONS, *RERANK], NESTED, {SSE: STREAM})
