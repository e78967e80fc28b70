"""OpenAI's answers: one object, or a stream of chunks that ends with `[DONE]`."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from worker.api.chat.answer import Answer
from worker.api.chat.choice import Block, Choice
from worker.api.chat.delta import Arguments, Call, Delta, Reasoning, Text
from worker.api.chat.fields import GenerationFields
from worker.api.chat.timings import prompt_progress, timings
from worker.api.dialects.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    prompt_offsets,
)
from worker.api.dialects.openai.schema import ChatBody, CompletionBody
from worker.api.http.encoding import data_event, dumps, in_parts, quoted
from worker.api.http.errors import CHUNK_STREAM
from worker.wire.messages import Finished, PromptProgress, PromptScored, Started, TokenLogprob

DONE = b"data: [DONE]\n\n"


class _Choices(Answer[Any]):
    """All choices of one request; what chats and plain completions have in common."""

    form = CHUNK_STREAM
    chunk_object: ClassVar[str]
    answer_object: ClassVar[str]
    empty: ClassVar[str]
    """The content of a streamed choice without any, as JSON."""

    body: GenerationFields

    def __post_init__(self) -> None:
        self._scored = self.asked.sampling.logprobs is not None
        self._head = {
            "id": self.asked.id,
            "object": self.chunk_object if self.asked.streams else self.answer_object,
            "created": int(time.time()),
            "model": self.state.name_of(self.asked.model),
            "system_fingerprint": self.state.served.build,
        }
        self._begin = f'data: {dumps(self._head)[:-1]},"choices":[{{"index":'

    # --- streamed ------------------------------------------------------------------------

    def encode(self, choice: Choice, delta: Delta) -> bytes:
        match delta:
            case Finished():
                is_last = self.has_ended
                times = _timings(choice) if is_last or self.body.timings_per_token else ""
                reason = f'"{choice.finish_reason}"'
                end = self._chunk(choice, self.empty, reason=reason, more=times)
                return end + self._ending() if is_last else end
            case Started() | PromptProgress() if self.body.return_progress:
                times = _timings(choice) if self.body.timings_per_token else ""
                progress = f',"prompt_progress":{dumps(prompt_progress(choice))}{times}'
                return self._chunk(choice, self.empty, more=progress)
            case _:
                return b""

    def _ending(self) -> bytes:
        if not self.body.stream_options.include_usage:
            return DONE
        return data_event(self._head | {"choices": []} | self._sums()) + DONE

    def _chunk(
        self,
        choice: Choice,
        content: str,
        logprobs: str = "null",
        reason: str = "null",
        more: str = "",
    ) -> bytes:
        """A chunk with one choice. `content` is JSON; `more` has further fields of the chunk."""
        return (
            f'{self._begin}{choice.index},{content},"logprobs":{logprobs},'
            f'"finish_reason":{reason}}}]{more}}}\n\n'
        ).encode()

    # --- whole ---------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        # Choices are built one at a time, because they may be large.
        return self._head | {"choices": map(self._whole, self.choices)} | self._sums()

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]: ...

    def _sums(self) -> dict[str, Any]:
        """`usage` and `timings`. A prompt counts once, for its first choice."""
        jobs = [choice.job for choice in self.choices if choice.job.counts_prompt]
        n_prompt = sum(job.prompt_tokens for job in jobs)
        n_out = sum(choice.tokens_out for choice in self.choices)
        n_reasoning = sum(choice.reasoning_tokens for choice in self.choices)
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_out,
            "total_tokens": n_prompt + n_out,
            "completion_tokens_details": {"reasoning_tokens": n_reasoning},
            "prompt_tokens_details": {"cached_tokens": sum(job.cached_tokens for job in jobs)},
        }
        return {"usage": usage, "timings": timings(self.choices[-1])}


class ChatAnswer(_Choices):
    body: ChatBody
    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"
    empty = '"delta":{}'

    def encode(self, choice: Choice, delta: Delta) -> bytes:
        logprobs = "null"
        match delta:
            case Text(text):
                content = f'{{"content":{quoted(text)}}}'
                if self._scored:
                    logprobs = _scores(chat_logprobs(delta.logprobs))
            case Reasoning() if not self.body.include_reasoning:
                return b""
            case Reasoning(text):
                content = f'{{"reasoning_content":{quoted(text)}}}'
            case Call(index):
                call = {"index": index, **_call(choice.blocks[-1])}
                content = f'{{"tool_calls":[{dumps(call)}]}}'
            case Arguments(_, ""):
                return b""
            case Arguments(index, text):
                kind, field = _CALLS[choice.blocks[-1].kind]
                part = f'"{kind}":{{"{field}":{quoted(text)}}}'
                content = f'{{"tool_calls":[{{"index":{index},{part}}}]}}'
            case Started():
                first = '"delta":{"role":"assistant","content":"","refusal":null}'
                progress = super().encode(choice, delta) if self.body.return_progress else b""
                return self._chunk(choice, first) + progress
            case _:
                return super().encode(choice, delta)
        more = _timings(choice) if self.body.timings_per_token else ""
        return self._chunk(choice, f'"delta":{content}', logprobs, more=more)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text = choice.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.body.include_reasoning and (reasoning := choice.reasoning):
            message["reasoning_content"] = reasoning
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = list(map(_call, choice.calls))
        return {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(choice.logprobs) if self._scored else None,
            "finish_reason": choice.finish_reason,
        }


_CALLS = {"call": ("function", "arguments"), "custom": ("custom", "input")}


def _call(call: Block) -> dict[str, Any]:
    kind, field = _CALLS[call.kind]
    return {"id": call.id, "type": kind, kind: {"name": call.name, field: call.text}}


class CompletionAnswer(_Choices):
    body: CompletionBody
    chunk_object = answer_object = "text_completion"
    empty = '"text":""'

    def encode(self, choice: Choice, delta: Delta) -> bytes:
        match delta:
            case Text(text, entries):
                more = _timings(choice) if self.body.timings_per_token else ""
                if not self._scored:
                    return self._chunk(choice, f'"text":{quoted(text)}', more=more)
                return self._part(choice, text, entries, _offsets(choice, entries), more)
            case Started() if choice.echo and not self._scored:
                echo = f'"text":{quoted(choice.echo)}'
                return super().encode(choice, delta) + self._chunk(choice, echo)
            case PromptScored(_, entries):
                chunks = b""
                if self.body.prompt_logprobs is not None:
                    of_prompt = _scores(prompt_logprobs(entries))
                    chunks = self._chunk(choice, f'"text":"","prompt_logprobs":{of_prompt}')
                if self._scored and self.body.echo:
                    offsets = prompt_offsets(choice.echo, entries)
                    chunks += self._part(choice, choice.echo, entries, offsets)
                return chunks
            case _:
                return super().encode(choice, delta)

    def _part(
        self,
        choice: Choice,
        text: str,
        entries: Sequence[TokenLogprob],
        offsets: list[int],
        more: str = "",
    ) -> bytes:
        logprobs = _scores(completion_logprobs(entries, offsets))
        return self._chunk(choice, f'"text":{quoted(text)}', logprobs, more=more)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self._scored:
            of_echo, entries = choice.prompt_logprobs if self.body.echo else (), choice.logprobs
            offsets = prompt_offsets(choice.echo, of_echo) + _offsets(choice, entries)
            logprobs = completion_logprobs([*of_echo, *entries], offsets)
        whole: dict[str, Any] = {"index": choice.index, "text": choice.echo + choice.text}
        if self.body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs)
        return {**whole, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _offsets(choice: Choice, entries: Sequence[TokenLogprob]) -> list[int]:
    """The offsets of the answer's tokens in a completion's text, which begins with the echo."""
    return [len(choice.echo) + entry.begin for entry in entries]


def _scores(value: object) -> str:
    """Log-probabilities as JSON. Many are encoded on a thread, in parts, so that others can run."""
    return b"".join(in_parts(value)).decode()


def _timings(choice: Choice) -> str:
    return f',"timings":{dumps(timings(choice))}'
