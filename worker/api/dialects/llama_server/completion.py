"""llama-server's own paths for generation: `/completion` and `/infill`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from worker.api.chat.answer import Answer
from worker.api.chat.choice import Choice
from worker.api.chat.delta import Delta, Text
from worker.api.chat.field_types import MAX_TOP_LOGPROBS
from worker.api.chat.operations import generation
from worker.api.chat.prompt_fields import prompts_of
from worker.api.chat.request import Generate
from worker.api.chat.scored import LOWEST, scored_token
from worker.api.chat.timings import prompt_progress, timings
from worker.api.dialects.llama_server.schema import (
    MAX_LOGPROBS,
    CompletionBody,
    InfillBody,
    TextBody,
)
from worker.api.http.encoding import data_event
from worker.api.http.errors import nested_events
from worker.api.http.faults import refusal
from worker.api.http.state import AppState
from worker.wire.messages import Finished, PromptProgress, Started, TokenLogprob
from worker.wire.sampling import PARAMETERS
from worker.wire.work import InferenceRequest, InfillPrompt, Prompt

_LAST = b"} \n"
"""Marks a stream's last event by a space, which JSON permits there: `response_fields` may leave out
every field that would identify it."""
STREAM = nested_events(lambda event: _LAST in event)
_STOP_TYPES = {"EOS": "eos", "MAX_TOKENS": "limit", "STOP_SEQUENCE": "word"}


def read_completion(body: CompletionBody, state: AppState) -> Generate:
    return _read(body, state, prompts_of(body.prompt))


def read_infill(body: InfillBody, state: AppState) -> Generate:
    before = "prompt" if len(body.prompt) > len(body.input_prefix) else "input_prefix"
    prompt = InfillPrompt(
        body.input_prefix + body.prompt,
        body.input_suffix,
        tuple((file.filename, file.text) for file in body.input_extra),
        (before, "input_suffix", "input_extra"),
    )
    return _read(body, state, (prompt,))


def _read(body: TextBody, state: AppState, prompts: tuple[Prompt, ...]) -> Generate:
    # Clients that send every field disable this one by 0 or a negative number.
    logprobs = min(max(body.n_probs or 0, 0), state.served.vocab_size) or None
    n_tokens = state.served.max_tokens_out
    if body.max_tokens is not None and body.max_tokens >= 0:
        n_tokens = min(body.max_tokens, n_tokens)
    if logprobs is not None and logprobs > MAX_TOP_LOGPROBS and logprobs * n_tokens > MAX_LOGPROBS:
        most = max(MAX_LOGPROBS // n_tokens, MAX_TOP_LOGPROBS)
        what = f"must be at most {most} for {n_tokens} tokens; lower n_predict for more"
        raise refusal("n_probs", "maximum", what, logprobs)
    asked = body.generate(state, "cmpl-", prompts, logprobs=logprobs)
    # Front ends request 0 tokens to see the probabilities of the next one.
    n_most = 1 if logprobs is not None and asked.max_tokens == 0 else asked.max_tokens
    return replace(asked, max_tokens=n_most, scores_end=True)


class TextAnswer(Answer[TextBody]):
    """One object per choice; in a stream, its parts and then its end."""

    form = STREAM

    def encode(self, choice: Choice, delta: Delta) -> bytes:
        match delta:
            case Text(text, logprobs, ids):
                part = self._part(choice, text, ids, logprobs)
                return data_event(part, is_large=bool(logprobs))
            case Started() | PromptProgress() if self.body.return_progress:
                progress = {"prompt_progress": prompt_progress(choice)}
                return data_event(self._part(choice, "", (), ()) | progress)
            case Finished(token_ids=ids):
                end = self._end(choice) | {"content": "", "tokens": []}
                event = data_event(_only(self.body.response_fields, end))
                last = data_event(self._part(choice, "", ids, ())) if ids else b""
                return last + (event.replace(b"}\n", _LAST) if self.has_ended else event)
            case _:
                return b""

    def _part(
        self, choice: Choice, text: str, ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        part: dict[str, Any] = {
            "index": choice.index,
            "content": text,
            "tokens": ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": choice.tokens_out,
            "tokens_evaluated": choice.job.prompt_tokens,
        }
        if self.body.timings_per_token:
            part["timings"] = timings(choice)
        if logprobs:
            part["completion_probabilities"] = self._logprobs(logprobs)
        return part

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> Iterator[dict[str, Any]]:
        """OpenAI's chat form with token ids; with `post_sampling_probs`, probabilities instead."""
        is_after = self.body.post_sampling_probs
        scored, top = (_drawn_token, "top_probs") if is_after else (scored_token, "top_logprobs")
        for entry in entries:
            several = [{"id": each.token_id, **scored(each)} for each in (entry, *entry.top)]
            yield several[0] | {top: several[1:]}

    def whole(self) -> Any:
        whole = [self._whole(choice) for choice in self.choices]
        return whole if len(whole) > 1 else whole[0]

    def _whole(self, choice: Choice) -> dict[str, Any]:
        whole = self._end(choice)
        if choice.logprobs:
            whole["completion_probabilities"] = self._logprobs(choice.logprobs)
        return _only(self.body.response_fields, whole)

    def _end(self, choice: Choice) -> dict[str, Any]:
        job, finished = choice.job, choice.finished
        assert finished is not None and isinstance(job.work, InferenceRequest)
        n_tokens = job.prompt_tokens + finished.tokens_out
        is_limit = finished.stop_reason == "MAX_TOKENS"
        end: dict[str, Any] = {
            "index": choice.index,
            "content": choice.text,
            "tokens": [*choice.token_ids, *finished.token_ids] if self.body.return_tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": self.state.name_of(self.asked.model),
            "tokens_predicted": choice.tokens_out,
            "tokens_evaluated": job.prompt_tokens,
            "tokens_cached": n_tokens - (finished.tokens_out > 0),  # the last is not computed
            "generation_settings": settings_of(job.work, self.body),
            "has_new_line": "\n" in choice.text,
            # Whether a full context ended it, with no cell left for the last token.
            "truncated": is_limit and n_tokens > self.state.served.context_length,
            "stop_type": _STOP_TYPES[finished.stop_reason],
            "stopping_word": finished.stop_sequence or "",
            "timings": timings(choice),
        }
        if isinstance(job.work.prompt, str | tuple):
            end["prompt"] = job.work.prompt
        return end


def _drawn_token(entry: TokenLogprob) -> dict[str, Any]:
    scored = scored_token(entry)
    del scored["logprob"]
    return scored | {"prob": math.exp(entry.logprob)}


def settings_of(work: InferenceRequest, body: TextBody) -> dict[str, Any]:
    """The settings that an answer is really sampled with, under llama-server's names."""
    sampling = work.sampling
    return {
        "seed": sampling.seed,
        **{known.theirs: getattr(sampling, name) for name, known in PARAMETERS.items()},
        "samplers": sampling.samplers,
        "dry_sequence_breakers": sampling.dry_sequence_breakers,
        "stop": work.stop,
        "max_tokens": work.max_tokens,
        "n_predict": work.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": [
            {"token": token, "bias": max(bias, LOWEST)} for token, bias in sampling.logit_bias
        ],
        "grammar": body.grammar or "",
        "n_probs": sampling.logprobs or 0,
        "post_sampling_probs": sampling.post_sampling_probs,
        "stream": body.stream,
        "lora": [{"id": number, "scale": scale} for number, scale in work.adapters],
        "timings_per_token": body.timings_per_token,
    }


def _only(paths: Sequence[str], answer: dict[str, Any]) -> dict[str, Any]:
    """The answer's values at `paths`, or all of it if there are none. Paths that do not exist are
    left out, as by llama-server."""
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
    generation(
        "/completion", "Continue a text, in llama-server's form",
        CompletionBody, read_completion, TextAnswer
    ),
    generation(
        "/infill", "Fill the gap between two texts", InfillBody, read_infill, TextAnswer
    ),
]  # fmt: skip
