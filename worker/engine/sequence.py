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
    snapshot_at: set[int] = field(default_factory=set)
    """Numbers of tokens after which its memory is to be kept aside."""
    slot: int | None = None
    admission: int = -1
    """Rank among all admissions: the largest is the youngest."""
    is_announced: bool = False
    """`Started` was sent; a preempted sequence does not start twice."""
    first_token_at: float | None = None
    n_most: int = 0
    """The number of tokens at which it ends."""
    holds_nothing: bool = False
    """No text is held back, and nothing asks for a look at it: neither stops nor log-probabilities.
    Known from the first token on."""
    pending_ids: list[int] = field(default_factory=list)
    """Sampled tokens whose text is still held back."""
    pending_logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens)
        self.stops = StopMatcher(self.request.stop)
        self.tokens += self.request.produced

    def follow_produced(self, piece: Callable[[int, tuple[str, ...]], bytes]) -> None:
        """Bring the text's state behind the tokens that another engine has sent."""
        for token in self.request.produced:
            self.stops.feed(self.detokenizer.feed(piece(token, self.request.shown_tokens)))

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
        return min(due, default=len(self.tokens)) - self.n_computed

    @property
    def is_decoding(self) -> bool:
        n_tokens = len(self.tokens)
        return n_tokens - self.n_computed == 1 and n_tokens > self.n_prompt
