"""OpenAI's answers: one object, or chunks of a stream that `[DONE]` ends.

Runs on the API process's event loop. Each engine frame becomes one piece to send, whatever its
number of tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from typing import Any, Protocol

from worker.api.encoding import dumps, quoted
from worker.api.errors import http_status, openai_error
from worker.api.openai.generation import Generation
from worker.api.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    prompt_offset,
)
from worker.api.output import (
    AssistantMessage,
    Call,
    CallArguments,
    CallBegun,
    Frame,
    Output,
    OutputPiece,
    Reasoning,
    Text,
    usage_of,
)
from worker.errors import WorkerError
from worker.supervisor.job import StreamEvent
from worker.wire.messages import (
    Finished,
    PromptProgress,
    PromptScored,
    Started,
    Token,
    TokenLogprob,
)

DONE = b"data: [DONE]\n\n"


class Form(Protocol):
    """The differences between chat and plain completions."""

    chunk_object: str
    answer_object: str
    first: str | None
    """The first content of a streamed choice, as JSON."""
    last: str
    """The content beside the finish reason, as JSON."""

    def delta(self, piece: OutputPiece) -> str | None:
        """A piece as the content of a streamed choice, as JSON; `None` if this form does not show
        it."""

    def choice(self, message: AssistantMessage) -> dict[str, Any]: ...

    def logprobs(self, entries: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]: ...


class ChatForm:
    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"
    first: str | None = '"delta":{"role":"assistant","content":"","refusal":null}'
    last = '"delta":{}'

    def delta(self, piece: OutputPiece) -> str | None:
        match piece:
            case Text(text):
                return f'"delta":{{"content":{quoted(text)}}}'
            case Reasoning(text):
                return f'"delta":{{"reasoning_content":{quoted(text)}}}'
            case CallBegun(index, id, name):
                call = {"index": index, **call_object(id, name, "")}
                return f'"delta":{{"tool_calls":[{dumps(call)}]}}'
            case CallArguments(index, text):
                function = f'{{"index":{index},"function":{{"arguments":{quoted(text)}}}}}'
                return f'"delta":{{"tool_calls":[{function}]}}'

    def choice(self, message: AssistantMessage) -> dict[str, Any]:
        answer: dict[str, Any] = {"role": "assistant", "content": message.text, "refusal": None}
        if message.reasoning:
            answer["reasoning_content"] = message.reasoning
        if message.calls:
            answer["content"] = message.text or None
            answer["tool_calls"] = [_call_of(call) for call in message.calls]
        return {"message": answer}

    def logprobs(self, entries: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
        return chat_logprobs(entries)


class CompletionForm:
    chunk_object = answer_object = "text_completion"
    first: str | None = None
    last = '"text":""'

    def delta(self, piece: OutputPiece) -> str | None:
        return f'"text":{quoted(piece.text)}' if isinstance(piece, Text) else None

    def choice(self, message: AssistantMessage) -> dict[str, Any]:
        return {"text": message.text}

    def logprobs(self, entries: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
        return completion_logprobs(entries, text_offset)


def call_object(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_of(call: Call) -> dict[str, Any]:
    return call_object(call.id, call.name, call.arguments)


class Choices:
    """All choices of one request, streamed or whole."""

    def __init__(
        self,
        generation: Generation,
        form: Form,
        outputs: Sequence[Output],
        model: str,
        build: str,
    ) -> None:
        self._generation, self._form, self._outputs = generation, form, outputs
        self._offsets = [0] * len(outputs)
        self._n_finished = 0
        self._head = {
            "id": generation.id,
            "object": form.chunk_object if generation.stream else form.answer_object,
            "created": generation.created,
            "model": model,
            "system_fingerprint": build,
        }

    # --- streamed ------------------------------------------------------------------------

    async def chunks(self, frames: AsyncIterable[Frame]) -> AsyncIterator[bytes]:
        head = dumps(self._head)[:-1]
        usage = ',"usage":null' if self._generation.include_usage else ""
        wants_progress = self._generation.requests[0].reports_progress
        async for index, frame in frames:
            encoded: list[str] = []
            try:
                for event in frame:
                    for part in self._parts(index, event):
                        timings = self._timings(index, event)
                        encoded.append(f'data: {head},"choices":[{part}]{usage}{timings}}}\n\n')
                    if wants_progress and isinstance(event, Started | PromptProgress):
                        part, progress = _choice(index, self._form.last), self._progress(index)
                        encoded.append(f'data: {head},"choices":[{part}]{usage}{progress}}}\n\n')
            except WorkerError as error:
                yield "".join(encoded).encode() + _failure(error)
                return
            if encoded:
                yield "".join(encoded).encode()
        if self._generation.include_usage:
            counted = usage_of(self._outputs, self._generation.choices_per_prompt)
            last = self._head | {"choices": [], "usage": counted}
            last |= {"timings": self._outputs[-1].timings}
            yield f"data: {dumps(last)}\n\n".encode() + DONE
        else:
            yield DONE

    def _parts(self, index: int, event: StreamEvent) -> Iterator[str]:
        """The choice objects, as JSON, for one event."""
        form, output = self._form, self._outputs[index]
        if isinstance(event, Started) and form.first is not None:
            yield _choice(index, form.first)
        pieces = output.take(event)
        if isinstance(event, Started | PromptScored):
            yield from self._echoed(index, event)
        entries = event.logprobs if isinstance(event, Token | Finished) else ()
        if entries and not any(isinstance(piece, Text) for piece in pieces):
            pieces = [Text(""), *pieces]
        for piece in pieces:
            if (delta := form.delta(piece)) is None:
                continue
            logprobs = "null"
            if isinstance(piece, Text):
                # Log-probabilities go with the first text of their event.
                if self._generation.top_logprobs is not None:
                    logprobs = dumps(form.logprobs(entries, self._offsets[index]))
                    entries = ()
                self._offsets[index] += len(piece.text)
            yield _choice(index, delta, logprobs)
        if isinstance(event, Finished):
            self._n_finished += 1
            yield _choice(index, form.last, reason=f'"{output.finish_reason}"')

    def _echoed(self, index: int, event: Started | PromptScored) -> Iterator[str]:
        """The prompt's log-probabilities and its echo, when an event completes them."""
        generation, output = self._generation, self._outputs[index]
        wants_logprobs = generation.echo and generation.top_logprobs is not None
        if isinstance(event, PromptScored) and generation.shows_prompt_logprobs:
            logprobs = dumps(prompt_logprobs(event.logprobs))
            yield _choice(index, f'"text":"","prompt_logprobs":{logprobs}')
        if generation.echo and isinstance(event, PromptScored if wants_logprobs else Started):
            text, entries = self._echo(index), output.prompt_logprobs
            logprobs = "null"
            if wants_logprobs:
                logprobs = dumps(self._form.logprobs(entries, prompt_offset(entries, text)))
            self._offsets[index] = len(text)
            yield _choice(index, f'"text":{quoted(text)}', logprobs)

    def _echo(self, index: int) -> str:
        generation = self._generation
        if not generation.echo:
            return ""
        return generation.echo[index // generation.choices_per_prompt]

    def _progress(self, index: int) -> str:
        output, timings = self._outputs[index], ""
        if self._generation.timings_per_token:
            timings = f',"timings":{dumps(output.timings)}'
        return f',"prompt_progress":{dumps(output.prompt_progress)}{timings}'

    def _timings(self, index: int, event: StreamEvent) -> str:
        """Timings of the choice that ended last, for the last chunk with a choice; or of each."""
        if self._generation.timings_per_token and isinstance(event, Token):
            return f',"timings":{dumps(self._outputs[index].timings)}'
        if not isinstance(event, Finished) or self._n_finished < len(self._outputs):
            return ""
        return f',"timings":{dumps(self._outputs[-1].timings)}'

    # --- whole ---------------------------------------------------------------------------

    async def whole(self, frames: AsyncIterable[Frame]) -> dict[str, Any]:
        async for index, frame in frames:
            for event in frame:
                self._outputs[index].take(event)
        return self._head | {
            "choices": [self._whole_choice(i, output) for i, output in enumerate(self._outputs)],
            "usage": usage_of(self._outputs, self._generation.choices_per_prompt),
            "timings": self._outputs[-1].timings,
        }

    def _whole_choice(self, index: int, output: Output) -> dict[str, Any]:
        generation, prompt, logprobs = self._generation, output.prompt_logprobs, None
        choice, text = self._form.choice(output.message), self._echo(index)
        if generation.top_logprobs is not None:
            echoed, offset = ((), 0) if not text else (prompt, prompt_offset(prompt, text))
            logprobs = self._form.logprobs([*echoed, *output.message.logprobs], offset)
        if text:
            choice["text"] = text + choice["text"]
        if generation.shows_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(prompt)
        return {
            "index": index,
            **choice,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }


def _choice(index: int, content: str, logprobs: str = "null", reason: str = "null") -> str:
    return f'{{"index":{index},{content},"logprobs":{logprobs},"finish_reason":{reason}}}'


def _failure(error: WorkerError) -> bytes:
    body = openai_error(error.code, error.message, http_status(error), error.details)
    return f"data: {dumps({'error': body})}\n\n".encode()
