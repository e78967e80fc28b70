"""A job's output as deltas and as what they add up to, the same for all dialects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

from worker.api.chat.delta import Arguments, Call, Delta, Parser, Reasoning, Text
from worker.supervisor.job import Job, StreamEvent
from worker.wire.messages import (
    Failed,
    Finished,
    PromptProgress,
    PromptScored,
    Started,
    Token,
    TokenLogprob,
)

FinishReason = Literal["stop", "length", "tool_calls"]


class Output:
    """One choice while it grows; `message` holds all of it."""

    def __init__(self, job: Job, parser_of: Callable[[str], Parser] | None) -> None:
        """`parser_of` makes the parser of the answer from the end of its prompt."""
        self.job = job
        self.finished: Finished | None = None
        self.progress: PromptProgress | None = None
        """The last one, of a request that reports it."""
        self.message = AssistantMessage()
        self.reasoning_tokens = 0
        self._n_unread = 0
        """Tokens since the last piece."""
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._parser: Parser | None = None
        self._parser_of = parser_of

    def take(self, event: StreamEvent) -> list[Delta]:
        """The pieces that an event adds.

        Raises:
            WorkerError: the job failed.
        """
        pieces: list[Delta] = []
        match event:
            case Token(_, text, ids, logprobs):
                pieces = [Text(text)] if self._parser is None else self._parser.feed(text)
                self.message.logprobs += logprobs
                self._count_reasoning(len(ids), pieces)
            case PromptProgress():
                self.progress = event
            case PromptScored(_, logprobs):
                self.prompt_logprobs = logprobs
            case Started(prompt_end=prompt_end):
                if self._parser is None and self._parser_of is not None:
                    self._parser = self._parser_of(prompt_end)
            case Finished():
                self.finished = event
                self.message.logprobs += event.logprobs
                pieces = self._parser.finish() if self._parser is not None else []
            case Failed(error=error):
                raise error
        for piece in pieces:
            self.message.add(piece)
        return pieces

    def _count_reasoning(self, n_tokens: int, pieces: list[Delta]) -> None:
        """Count the tokens of the reasoning, its marks included."""
        self._n_unread += n_tokens
        if any(isinstance(piece, Reasoning) for piece in pieces):
            self.reasoning_tokens += self._n_unread
        if pieces:
            self._n_unread = 0

    @property
    def finish_reason(self) -> FinishReason:
        assert self.finished is not None
        if self.finished.stop_reason == "MAX_TOKENS":
            return "length"
        return "tool_calls" if self.message.calls else "stop"

    @property
    def timings(self) -> dict[str, float]:
        """llama-server's timings, which llama-swap and others read."""
        job, done, progress = self.job, self.finished, self.progress
        n_prompt = job.prompt_tokens - job.cached_tokens
        n_out = done.tokens_out if done is not None else job.tokens_out
        prompt_ms = done.prompt_time_ms if done is not None else 0.0
        if done is None and progress is not None:
            n_prompt, prompt_ms = progress.n_computed - job.cached_tokens, progress.seconds * 1000
        elif not n_out:
            n_prompt = 0
        predicted_ms = done.decode_time_ms if done is not None else job.decode_time_ms
        return {
            "cache_n": job.cached_tokens,
            "prompt_n": n_prompt,
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_second": round(n_prompt * 1000 / prompt_ms, 3) if prompt_ms else 0.0,
            "predicted_n": n_out,
            "predicted_ms": round(predicted_ms, 3),
            "predicted_per_second": round(n_out * 1000 / predicted_ms, 3) if predicted_ms else 0.0,
        }

    @property
    def prompt_progress(self) -> dict[str, float]:
        """How far the prompt is, as llama-server tells it."""
        job, progress = self.job, self.progress
        return {
            "total": job.prompt_tokens,
            "cache": job.cached_tokens,
            "processed": progress.n_computed if progress is not None else job.cached_tokens,
            "time_ms": round(progress.seconds * 1000, 3) if progress is not None else 0.0,
        }


class AssistantMessage:
    """The pieces of a choice, joined."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.calls: list[FoundCall] = []

    def add(self, piece: Delta) -> None:
        match piece:
            case Text(text):
                self._texts.append(text)
            case Reasoning(text):
                self._reasoning.append(text)
            case Call(_, id, name):
                self.calls.append(FoundCall(id, name))
            case Arguments(call, text):
                self.calls[call].arguments += text

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)


class FoundCall:
    def __init__(self, id: str, name: str) -> None:
        self.id, self.name, self.arguments = id, name, ""


def usage_of(outputs: Sequence[Output], choices_per_prompt: int) -> dict[str, Any]:
    """OpenAI's usage. A prompt is counted once; its first choice tells what was cached."""
    prompts = [output.job for output in outputs[::choices_per_prompt]]
    prompt_tokens = sum(job.prompt_tokens for job in prompts)
    tokens_out = sum(o.finished.tokens_out for o in outputs if o.finished is not None)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens_out,
        "total_tokens": prompt_tokens + tokens_out,
        "completion_tokens_details": {
            "reasoning_tokens": sum(output.reasoning_tokens for output in outputs)
        },
        "prompt_tokens_details": {"cached_tokens": sum(job.cached_tokens for job in prompts)},
    }


Frame = tuple[int, list[StreamEvent]]
"""A job's index and the events of one engine frame."""


async def merged(jobs: Sequence[Job]) -> AsyncIterator[Frame]:
    """The frames of all jobs, in the order of their arrival."""
    if len(jobs) == 1:
        async for frame in jobs[0]:
            yield 0, frame
        return
    frames: asyncio.Queue[Frame | None] = asyncio.Queue()

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
