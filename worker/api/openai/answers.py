"""OpenAI's answers: one object, or chunks of a stream ended by `[DONE]`.

Runs on the API process's event loop. Each engine frame becomes one piece to send, whatever
number of tokens it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from json.encoder import encode_basestring
from typing import Any, Protocol

from worker.api.jobs import Job
from worker.api.middleware import openai_error
from worker.api.openai.logprobs import chat_logprobs, completion_logprobs
from worker.api.openai.requests import Ask
from worker.api.openai.tools import ToolCallParser
from worker.api.responses import LINE_BREAKS, dumps
from worker.engine.generation import StreamEvent
from worker.errors import WorkerError
from worker.messages import Failed, Finished, Started, Token, TokenLogprob

DONE = b"data: [DONE]\n\n"


class Kind(Protocol):
    """What tells chat from plain completions."""

    chunk_object: str
    answer_object: str

    def delta(self, text: str) -> str:
        """The part of a streamed choice that carries `text`, as JSON."""

    def choice(self, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]: ...

    def logprobs(self, entries: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]: ...


class Chat:
    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"

    def delta(self, text: str) -> str:
        return f'"delta":{{"content":{_quoted(text)}}}'

    def choice(self, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {"message": message}

    def logprobs(self, entries: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
        return chat_logprobs(entries)


class Completion:
    chunk_object = answer_object = "text_completion"

    def delta(self, text: str) -> str:
        return f'"text":{_quoted(text)}'

    def choice(self, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, entries: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
        return completion_logprobs(entries, text_offset)


class Choice:
    """One choice while it grows; `texts` and `entries` are kept for the whole answer only."""

    def __init__(self, ask: Ask, kind: Kind, index: int) -> None:
        self.index = index
        self.finished: Finished | None = None
        self.calls: list[dict[str, Any]] = []
        self._ask, self._kind = ask, kind
        self._parser = ToolCallParser(ask.tools) if ask.tools is not None else None
        self._texts: list[str] = []
        self._entries: list[TokenLogprob] = []
        self._offset = 0

    @property
    def finish_reason(self) -> str:
        if self.calls:
            return "tool_calls"
        assert self.finished is not None
        return "length" if self.finished.stop_reason == "MAX_TOKENS" else "stop"

    # --- streamed ------------------------------------------------------------------------

    def parts(self, event: StreamEvent) -> Iterator[str]:
        """The choice objects, as JSON, that an event adds to the stream."""
        match event:
            case Started():
                if isinstance(self._kind, Chat):
                    yield self._part('"delta":{"role":"assistant","content":"","refusal":null}')
            case Token():
                text = event.text if self._parser is None else self._parser.feed(event.text)
                if text or event.logprobs:
                    logprobs = "null"
                    if self._ask.top_logprobs is not None:
                        entries = self._kind.logprobs(event.logprobs, self._offset)
                        logprobs = dumps(entries)
                    yield self._part(self._kind.delta(text), logprobs)
                self._offset += len(event.text)
            case Finished():
                self.finished = event
                if self._parser is not None:
                    rest, self.calls = self._parser.finish()
                    if rest:
                        yield self._part(self._kind.delta(rest))
                    if self.calls:
                        deltas = [{"index": i, **call} for i, call in enumerate(self.calls)]
                        yield self._part(f'"delta":{{"tool_calls":{dumps(deltas)}}}')
                empty = '"delta":{}' if isinstance(self._kind, Chat) else '"text":""'
                yield self._part(empty, reason=f'"{self.finish_reason}"')

    def _part(self, content: str, logprobs: str = "null", reason: str = "null") -> str:
        return f'{{"index":{self.index},{content},"logprobs":{logprobs},"finish_reason":{reason}}}'

    # --- whole ---------------------------------------------------------------------------

    def take(self, event: StreamEvent) -> None:
        match event:
            case Token():
                self._texts.append(event.text)
                self._entries += event.logprobs
            case Finished():
                self.finished = event
            case Failed(error=error):
                raise error

    def whole(self) -> dict[str, Any]:
        text = "".join(self._texts)
        if self._parser is not None:
            content = self._parser.feed(text)
            rest, self.calls = self._parser.finish()
            text = content + rest
        logprobs = None
        if self._ask.top_logprobs is not None:
            logprobs = self._kind.logprobs(self._entries, 0)
        return {
            "index": self.index,
            **self._kind.choice(text, self.calls),
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
        }


class Answer:
    """All choices of one request, streamed or whole."""

    def __init__(self, ask: Ask, kind: Kind, jobs: Sequence[Job], model: str, build: str) -> None:
        self._ask, self._jobs, self._kind = ask, jobs, kind
        self._choices = [Choice(ask, kind, index) for index in range(len(jobs))]
        self._head = {
            "id": ask.id,
            "object": kind.chunk_object if ask.stream else kind.answer_object,
            "created": ask.created,
            "model": model,
            "system_fingerprint": build,
        }

    async def chunks(self) -> AsyncIterator[bytes]:
        head = dumps(self._head)[:-1]
        tail = ',"usage":null}\n\n' if self._ask.include_usage else "}\n\n"
        async for index, frame in merged(self._jobs):
            choice = self._choices[index]
            pieces = [
                f'data: {head},"choices":[{part}]{tail}'
                for event in frame
                for part in choice.parts(event)
            ]
            if isinstance(frame[-1], Failed):
                yield "".join(pieces).encode() + _failure(frame[-1].error)
                return
            if pieces:
                yield "".join(pieces).encode()
        if self._ask.include_usage:
            usage = dumps(self._head | {"choices": [], "usage": self._usage()})
            yield f"data: {usage}\n\n".encode() + DONE
        else:
            yield DONE

    async def whole(self) -> dict[str, Any]:
        async for index, frame in merged(self._jobs):
            for event in frame:
                self._choices[index].take(event)
        choices = [choice.whole() for choice in self._choices]
        return self._head | {"choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        # Choices of one prompt share it: it is counted once, and cached if any found it so.
        n = self._ask.choices_per_prompt
        prompts = [self._jobs[i : i + n] for i in range(0, len(self._jobs), n)]
        prompt_tokens = sum(group[0].prompt_tokens for group in prompts)
        tokens_out = sum(c.finished.tokens_out for c in self._choices if c.finished is not None)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens_out,
            "total_tokens": prompt_tokens + tokens_out,
            "prompt_tokens_details": {
                "cached_tokens": sum(group[0].cached_tokens for group in prompts)
            },
        }


async def merged(jobs: Sequence[Job]) -> AsyncIterator[tuple[int, list[StreamEvent]]]:
    """The frames of all jobs as they come, each with its job's index."""
    if len(jobs) == 1:
        async for frame in jobs[0]:
            yield 0, frame
        return
    frames: asyncio.Queue[tuple[int, list[StreamEvent]] | None] = asyncio.Queue()

    async def pump(index: int, job: Job) -> None:
        try:
            async for frame in job:
                frames.put_nowait((index, frame))
        finally:
            frames.put_nowait(None)

    pumps = [asyncio.create_task(pump(index, job)) for index, job in enumerate(jobs)]
    try:
        running = len(pumps)
        while running:
            item = await frames.get()
            if item is None:
                running -= 1
            else:
                yield item
        await asyncio.gather(*pumps)
    finally:
        for task in pumps:
            task.cancel()


def _failure(error: WorkerError) -> bytes:
    body = openai_error(error.code, error.message, error.details)
    return f"data: {dumps({'error': body})}\n\n".encode()


def _quoted(text: str) -> str:
    quoted = encode_basestring(text)
    return quoted if text.isascii() else quoted.translate(LINE_BREAKS)
