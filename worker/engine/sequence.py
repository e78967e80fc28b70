"""One request while it is in the engine: its tokens, how far they are computed, its text so far.

Built on the intake thread, owned by the engine thread from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from worker.engine.text.detokenizer import Detokenizer
from worker.engine.text.stops import StopMatcher
from worker.llama.sampler import Sampler
from worker.wire.messages import TokenLogprob
from worker.wire.work import InferenceRequest

NO_LIMIT = 2**31


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is the prompt followed by what was sampled; the first `n_computed` of them are in
    the KV cache. A prompt being computed, a running decode and a sequence that starts over after
    preemption differ in these numbers alone.
    """

    request_id: int
    request: InferenceRequest
    tokens: list[int]
    sampler: Sampler
    detokenizer: Detokenizer = field(default_factory=Detokenizer)
    stops: StopMatcher = field(default_factory=StopMatcher)
    n_prompt: int = 0
    n_computed: int = 0
    n_cached: int = 0
    """Tokens whose cells were there when the sequence got its slot."""
    n_shared: int = 0
    """Of those, cells that another running sequence uses too."""
    n_system: int = 0
    """Tokens of its chat's system prompt, with which other chats may begin."""
    snapshot_at: dict[int, bool] = field(default_factory=dict)
    """Numbers of tokens after which its memory is to be kept aside, and whether that is likely to
    be used."""
    was_looked_up: bool = False
    """A store was asked for its beginning."""
    slot: int | None = None
    admission: int = -1
    """Rank among all admissions: the largest is the youngest."""
    max_rows: int = NO_LIMIT
    """Of its prompt in one batch."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """As far as they are known; empty again once they are sent."""
    started_at: float | None = None
    """When `Started` was sent; a preempted sequence does not start twice."""
    first_token_at: float | None = None
    n_most: int = 0
    """The number of tokens at which it ends."""
    holds_nothing: bool = False
    """No text is held back, and nothing asks for a look at it: neither stops nor log-probabilities.
    Known from the first token on."""
    pending_ids: list[int] = field(default_factory=list)
    """Sampled tokens whose text is still held back."""
    is_scored: bool = False
    """The log-probabilities of its prompt were sent."""
    pending_logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens)
        self.stops = StopMatcher(self.request.stop)
        self.tokens += self.request.produced

    def follow_produced(self, piece: Callable[[int, tuple[str, ...]], bytes]) -> None:
        """Bring the text's state behind the tokens that another engine has sent."""
        for token in self.request.produced:
            self.match_stops(self.detokenizer.feed(piece(token, self.request.shown_tokens)))

    def match_stops(self, text: str) -> tuple[str, str | None]:
        """What of a text can be sent, and the stop that ends the answer; none ends it too soon."""
        if self.n_out < self.request.sampling.min_tokens:
            return text, None
        return self.stops.feed(text)

    @property
    def n_out(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_left(self) -> int:
        """Tokens that must be computed before the next one can be sampled."""
        return len(self.tokens) - self.n_computed

    @property
    def n_next(self) -> int:
        """Of those, as many as may be computed before the next snapshot is due."""
        due = [at for at in self.snapshot_at if at > self.n_computed]
        return min(min(due, default=len(self.tokens)) - self.n_computed, self.max_rows)

    @property
    def prompt_time_ms(self) -> float:
        """From its start to its first token."""
        if self.started_at is None or self.first_token_at is None:
            return 0.0
        return round(1000 * (self.first_token_at - self.started_at), 3)

    @property
    def scores_prompt(self) -> bool:
        """The log-probabilities of its prompt's tokens are still to be found."""
        return self.request.prompt_logprobs is not None and not self.is_scored

    @property
    def is_decoding(self) -> bool:
        n_tokens = len(self.tokens)
        return n_tokens - self.n_computed == 1 and n_tokens > self.n_prompt
