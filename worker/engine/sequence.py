"""One request while it is in the engine: its tokens, how far they are computed, its text so far.

Built on the intake thread, owned by the engine thread from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from worker.engine.detokenizer import Detokenizer
from worker.engine.stops import StopMatcher
from worker.messages import InferenceRequest, TokenLogprob


class SamplerHandle(Protocol):
    """A native sampler chain as the engine sees it: something to be freed."""

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is the prompt followed by what was sampled; the first `n_computed` of them are in
    the KV cache. A prompt being computed, a running decode and a sequence that starts over after
    preemption differ in these numbers alone.
    """

    request_id: int
    request: InferenceRequest
    tokens: list[int]
    sampler: SamplerHandle
    detokenizer: Detokenizer = field(default_factory=Detokenizer)
    stops: StopMatcher = field(default_factory=StopMatcher)
    n_prompt: int = 0
    n_computed: int = 0
    slot: int | None = None
    admission: int = -1
    """Rank among all admissions: the largest is the youngest."""
    is_announced: bool = False
    """`Started` was sent; a preempted sequence does not start twice."""
    first_token_at: float | None = None
    pending_ids: list[int] = field(default_factory=list)
    """Sampled tokens whose text is still held back."""
    pending_logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens)
        self.stops = StopMatcher(self.request.stop)

    @property
    def n_out(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_left(self) -> int:
        """Tokens that must be computed before the next one can be sampled."""
        return len(self.tokens) - self.n_computed

    @property
    def is_decoding(self) -> bool:
        n_tokens = len(self.tokens)
        return n_tokens - self.n_computed == 1 and n_tokens > self.n_prompt
