"""OpenAI's answers: one object, or chunks of a stream that `[DONE]` ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from worker.api.chat.delta import Arguments, Call, Delta, Reasoning, Text
from worker.api.chat.output import AssistantMessage, Output, usage_of
from worker.api.chat.run import Answer
from worker.api.dialects.openai.generation import Generation
from worker.api.dialects.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    prompt_offset,
)
from worker.api.http.encoding import dumps, quoted
from worker.api.http.errors import error_object
from worker.api.http.operation import StreamForm
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


def failure(error: WorkerError) -> bytes:
    """The last event of a stream that failed."""
    return f"data: {dumps({'error': error_object(error)})}\n\n".encode()


CHUNK_STREAM = StreamForm(
    lambda event: event.startswith((b"data: [DONE]", b'data: {"error":')),
    lambda error, first, last: failure(error),
)


class ChatForm:
    """What chat completions have of their own."""

    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"
    first: str | None = '"delta":{"role":"assistant","content":"","refusal":null}'
    """The first content of a streamed choice, as JSON."""
    last = '"delta":{}'
    """The content beside the finish reason, as JSON."""

    def delta(self, piece: Delta) -> str | None:
        """A piece as the content of a streamed choice, as JSON; `None` if it is not shown."""
        match piece:
            case Text(text):
                return f'"delta":{{"content":{quoted(text)}}}'
            case Reasoning(text):
                return f'"delta":{{"reasoning_content":{quoted(text)}}}'
            case Call(index, id, name):
                call = {"index": index, **_call_object(id, name)}
                return f'"delta":{{"tool_calls":[{dumps(call)}]}}'
            case Arguments(index, text):
                function = f'{{"index":{index},"function":{{"arguments":{quoted(text)}}}}}'
                return f'"delta":{{"tool_calls":[{function}]}}'

    def choice(self, message: AssistantMessage) -> dict[str, Any]:
        answer: dict[str, Any] = {"role": "assistant", "content": message.text, "refusal": None}
        if message.reasoning:
            answer["reasoning_content"] = message.reasoning
        if message.calls:
            answer["content"] = message.text or None
            answer["tool_calls"] = [
                _call_object(call.id, call.name, call.arguments) for call in message.calls
            ]
        return {"message": answer}

    def logprobs(self, entries: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
        return chat_logprobs(entries)


class CompletionForm:
    """What plain completions have in its place."""

    chunk_object = answer_object = "text_completion"
    first: str | None = None
    last = '"text":""'

    def delta(self, piece: Delta) -> str | None:
        return f'"text":{quoted(piece.text)}' if isinstance(piece, Text) else None

    def choice(self, message: AssistantMessage) -> dict[str, Any]:
        return {"text": message.text}

    def logprobs(self, entries: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
        return completion_logprobs(entries, text_offset)


Form = ChatForm | CompletionForm


def _call_object(id: str, name: str, arguments: str = "") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Choices(Answer):
    """All choices of one request, streamed or whole."""

    def __init__(
        self, generation: Generation, form: Form, outputs: Sequence[Output], model: str, build: str
    ) -> None:
        self._generation, self._form, self._outputs = generation, form, outputs
        self._offsets = [0] * len(outputs)
        self._n_finished = 0
        self._head = {
            "id": generation.id,
            "object": form.chunk_object if generation.body.stream else form.answer_object,
            "created": generation.created,
            "model": model,
            "system_fingerprint": build,
        }
        self._begin = f"data: {dumps(self._head)[:-1]}"
        self._usage = ',"usage":null' if generation.body.stream_options.include_usage else ""
        self._wants_progress = generation.requests[0].reports_progress
        self._times_tokens = generation.body.timings_per_token

    # --- streamed ------------------------------------------------------------------------

    def failure(self, error: WorkerError) -> bytes:
        return failure(error)

    def ending(self) -> bytes:
        if not self._generation.body.stream_options.include_usage:
            return DONE
        last = self._head | {"choices": []} | self._sums()
        return f"data: {dumps(last)}\n\n".encode() + DONE

    def parts(self, index: int, event: StreamEvent) -> Iterator[bytes]:
        form, output = self._form, self._outputs[index]
        if isinstance(event, Started) and form.first is not None:
            yield self._chunk(index, form.first)
        pieces = output.take(event)
        entries: tuple[TokenLogprob, ...] = ()
        match event:
            case Token() | Finished():
                entries = event.logprobs
            case Started() | PromptScored():
                yield from self._echoed(index, event)
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
            yield self._chunk(index, delta, logprobs, more=self._timings(index, event))
        if isinstance(event, Finished):
            self._n_finished += 1
            reason, timings = f'"{output.finish_reason}"', self._timings(index, event)
            yield self._chunk(index, form.last, reason=reason, more=timings)
        if self._wants_progress and isinstance(event, Started | PromptProgress):
            yield self._chunk(index, form.last, more=self._progress(index))

    def _chunk(
        self, index: int, content: str, logprobs: str = "null", reason: str = "null", more: str = ""
    ) -> bytes:
        """A chunk with one choice, whose `content` is JSON; `more` stands beside the choice."""
        choice = f'{{"index":{index},{content},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return f'{self._begin},"choices":[{choice}]{self._usage}{more}}}\n\n'.encode()

    def _echoed(self, index: int, event: Started | PromptScored) -> Iterator[bytes]:
        """The prompt's log-probabilities and its echo, when an event completes them."""
        generation, output = self._generation, self._outputs[index]
        wants_logprobs = generation.echo and generation.top_logprobs is not None
        if isinstance(event, PromptScored) and generation.shows_prompt_logprobs:
            logprobs = dumps(prompt_logprobs(event.logprobs))
            yield self._chunk(index, f'"text":"","prompt_logprobs":{logprobs}')
        if generation.echo and isinstance(event, PromptScored if wants_logprobs else Started):
            text, entries = self._echo(index), output.prompt_logprobs
            logprobs = "null"
            if wants_logprobs:
                logprobs = dumps(self._form.logprobs(entries, prompt_offset(entries, text)))
            self._offsets[index] = len(text)
            yield self._chunk(index, f'"text":{quoted(text)}', logprobs)

    def _echo(self, index: int) -> str:
        generation = self._generation
        return generation.echo[index // generation.body.n] if generation.echo else ""

    def _progress(self, index: int) -> str:
        output, timings = self._outputs[index], ""
        if self._times_tokens:
            timings = f',"timings":{dumps(output.timings)}'
        return f',"prompt_progress":{dumps(output.prompt_progress)}{timings}'

    def _timings(self, index: int, event: StreamEvent) -> str:
        """Timings of the choice that ended last, for the last chunk with a choice; or of each."""
        if self._times_tokens and isinstance(event, Token):
            return f',"timings":{dumps(self._outputs[index].timings)}'
        if not isinstance(event, Finished) or self._n_finished < len(self._outputs):
            return ""
        return f',"timings":{dumps(self._outputs[-1].timings)}'

    # --- whole ---------------------------------------------------------------------------

    def take(self, index: int, event: StreamEvent) -> None:
        self._outputs[index].take(event)

    def whole(self) -> dict[str, Any]:
        choices = [self._whole_choice(i, output) for i, output in enumerate(self._outputs)]
        return self._head | {"choices": choices} | self._sums()

    def _sums(self) -> dict[str, Any]:
        usage = usage_of(self._outputs, self._generation.body.n)
        return {"usage": usage, "timings": self._outputs[-1].timings}

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
