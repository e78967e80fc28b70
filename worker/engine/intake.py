"""The engine process's receiving end: commands in, checked work on to the loop. Intake thread.

Prompts are rendered and tokenised and grammars compiled here, while the engine thread computes:
llama.cpp's vocabulary may be read from any thread, and native calls do not hold the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worker.engine.loop import Loop
from worker.engine.prompt import PromptBuilder
from worker.engine.sequence import SamplerHandle, Sequence
from worker.errors import InvalidRequest, WorkerError
from worker.messages import (
    Accepted,
    ApplyTemplate,
    Cancel,
    Command,
    Detokenize,
    Embed,
    Event,
    InferenceRequest,
    ProveResidency,
    Rejected,
    Reply,
    Residency,
    Sampling,
    Submit,
    Tokenize,
)


class Intake:
    def __init__(
        self,
        loop: Loop,
        prompts: PromptBuilder,
        send: Callable[[list[Event]], None],
        *,
        make_sampler: Callable[[Sampling, list[int]], SamplerHandle],
        embed: Callable[[list[int]], list[float]] | None,
        prove_residency: Callable[[], Residency],
        kv_unified: bool,
    ) -> None:
        self._loop, self._prompts, self._send = loop, prompts, send
        self._make_sampler, self._embed = make_sampler, embed
        self._prove_residency, self._kv_unified = prove_residency, kv_unified

    def handle(self, command: Command) -> None:
        """Answer a command, or hand its work to the engine thread."""
        match command:
            case Submit(request_id, request):
                self._submit(request_id, request)
            case Cancel(request_id):
                self._loop.cancel(request_id)
            case Tokenize(call_id, text, add_special):
                self._answer(call_id, lambda: self._prompts.tokenize(text, add_special=add_special))
            case Detokenize(call_id, tokens):
                self._answer(call_id, lambda: self._prompts.detokenize(tokens))
            case ApplyTemplate(call_id, prompt):
                self._answer(call_id, lambda: self._prompts.render(prompt))
            case Embed(call_id, inputs):
                self._embed_all(call_id, inputs)
            case ProveResidency(call_id):
                self._answer(call_id, self._prove_residency)
            case _:
                raise AssertionError(f"{type(command).__name__} is not for a running engine")

    def _submit(self, request_id: int, request: InferenceRequest) -> None:
        try:
            sequence = self._prepare(request_id, request)
        except WorkerError as error:
            self._send([Rejected(request_id, error)])
            return
        # First the acceptance, then the loop: its events must come after.
        self._send([Accepted(request_id, len(sequence.tokens))])
        self._loop.submit(sequence)

    def _prepare(self, request_id: int, request: InferenceRequest) -> Sequence:
        if self._embed is not None:
            raise InvalidRequest(
                "model: this model makes embeddings and generates no text", field="model"
            )
        if request.deterministic and self._kv_unified:
            raise InvalidRequest(
                "deterministic: not with a unified KV cache, where other requests' cells change "
                "the order of the sums; start the worker without --kv-unified",
                field="deterministic",
            )
        tokens = self._prompts.build(request.prompt)
        sampler = self._make_sampler(request.sampling, tokens)
        return Sequence(request_id, request, tokens, sampler)

    def _embed_all(self, call_id: int, inputs: tuple[str | tuple[int, ...], ...]) -> None:
        embed = self._embed

        def prepare() -> list[list[int]]:
            if embed is None:
                raise InvalidRequest(
                    "model: this model generates text and makes no embeddings", field="model"
                )
            return [self._prompts.build(text) for text in inputs]

        try:
            prepared = prepare()
        except WorkerError as error:
            self._send([Reply(call_id, error=error)])
            return
        assert embed is not None
        self._loop.call(
            lambda: self._answer(call_id, lambda: [(len(t), embed(t)) for t in prepared])
        )

    def _answer(self, call_id: int, compute: Callable[[], Any]) -> None:
        try:
            reply = Reply(call_id, compute())
        except WorkerError as error:
            reply = Reply(call_id, error=error)
        self._send([reply])
