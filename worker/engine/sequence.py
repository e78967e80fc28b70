"""One request inside the engine: its tokens, how many are computed, its text so far.

An intake thread builds it; from then on it belongs to the engine thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from encodings.utf_8 import IncrementalDecoder as Utf8
from functools import partial

from worker.engine.cache.moves import State
from worker.engine.media.span import Span
from worker.engine.text.lines import LineGuard
from worker.engine.text.stops import StopMatcher
from worker.llama.sampler import Sampler
from worker.wire.messages import CacheTier, TokenLogprob
from worker.wire.work import InferenceRequest

NO_LIMIT = 2**31
MOST_NEW = 32
"""More new tokens than this are computed like a prompt: within the prompts' share of a step."""


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is the prompt followed by the sampled tokens; the cells of the first `n_computed`
    are in the KV cache.

    A prompt being computed, a running decode and a sequence that starts over after preemption
    differ only in these numbers.
    """

    # The fields of every step come first: they share cache lines, which a pass over the weights
    # evicts.
    request_id: int
    request: InferenceRequest
    tokens: list[int]
    sampler: Sampler
    slot: int | None = None
    n_computed: int = 0
    n_prompt: int = field(init=False)
    n_most: int = 0
    """The number of tokens at which it ends, prompt included."""
    holds_nothing: bool = False
    """Whether no text is held back and each token can be emitted at once. Never set with stops,
    line limits or log-probabilities, nor before the first token, nor while it repeats what an
    earlier engine sent."""
    snapshot_at: dict[int, bool] = field(default_factory=dict)
    """Numbers of tokens after which a snapshot of its memory is taken, each with whether a later
    prompt is likely to use it."""
    tier: CacheTier = "device"
    """Where the reused tokens were kept when it got its slot."""
    first_token_at: float | None = None
    characters: Utf8 = field(default_factory=partial(Utf8, "replace"))
    """Holds back an incomplete character; bytes that are not UTF-8 become U+FFFD."""
    stops: StopMatcher = field(init=False)
    lines: LineGuard = field(init=False)
    prompt_end: str = ""
    """The last characters of its prompt, control tokens included."""
    n_system: int = 0
    """Tokens of its chat's system prompt, which other chats may share; 0 without snapshots."""
    awaits_disk: bool = False
    """Whether it waits for a state from the disk to continue from."""
    awaited: Awaited | None = None
    """The prefix that another sequence computes for both."""
    saved: State | None = None
    """The state that it will continue from: its own if it was preempted, or one from the disk."""
    spans: tuple[Span, ...] = ()
    """The places of pictures and sounds in its prompt."""
    max_rows: int = NO_LIMIT
    """The most rows of its prompt in one batch."""
    n_reported: int = 0
    """How much of its prompt `PromptProgress` has reported. Less is computed if it starts over."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """The log-probabilities of its prompt that are known so far; empty once they are sent."""
    tried_at: int = -1
    """The number of its tokens when it last started over because NaN was computed; -1 if never."""
    started_at: float | None = None
    """When `Started` was sent; a preempted sequence does not start twice."""
    pending_ids: list[int] = field(default_factory=list)
    """Sampled tokens whose text is still held back."""
    begins: list[int] = field(default_factory=list)
    """Where the text of each of them begins in the answer, in characters."""
    n_read: int = 0
    """Characters of the text so far, including those that are held back or cut off."""
    n_released: int = 0
    """Those of them that no stop can cut off any more."""
    end_token: int | None = None
    """The end-of-generation token that was drawn."""
    is_scored: bool = False
    """Whether the log-probabilities of its prompt were sent."""
    pending_logprobs: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.tokens)
        self.stops = StopMatcher(self.request.stop)
        self.lines = LineGuard(self.request.lines)

    def follow_produced(self, piece: Callable[[int, tuple[str, ...]], bytes]) -> None:
        """Continue after the tokens that an earlier engine has sent."""
        for token in self.request.produced:
            self.tokens.append(token)
            text = self.characters.decode(piece(token, self.request.shown_tokens))
            self.n_released += len(self.match_stops(text)[0])
        self.begins.clear()

    def match_stops(self, text: str) -> tuple[str, str | None]:
        """The part of a text that can be sent, and the stop that matched, if any. No stop matches
        before `min_tokens`."""
        self.begins.append(self.n_read)
        self.n_read += len(text)
        if self.n_out < self.request.sampling.min_tokens:
            return text, None
        text, stop = self.stops.feed(text)
        is_new = self.n_released >= self.request.sent_chars
        return self.lines.feed(text, is_new=is_new), stop

    @property
    def prompt_ids(self) -> bytes:
        """Its prompt for another engine, as 32-bit integers; empty if it has media, which are not
        tokens."""
        return b"" if self.spans else array("i", self.tokens[: self.n_prompt]).tobytes()

    @property
    def is_on_trial(self) -> bool:
        """Whether it must compute its next token alone (see `Scheduler.put_on_trial`)."""
        return self.tried_at == len(self.tokens)

    @property
    def n_out(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_left(self) -> int:
        """Tokens that must be computed before the next one can be sampled."""
        return len(self.tokens) - self.n_computed

    @property
    def n_next(self) -> int:
        """How many of these tokens the next step may compute."""
        n_computed, end = self.n_computed, len(self.tokens)
        if self.snapshot_at:
            end = min((at for at in self.snapshot_at if at > n_computed), default=end)
        for span in self.spans:  # a batch has either embeddings or tokens
            if n_computed < span.end:
                end = min(end, span.end if span.start <= n_computed else span.start)
                break
        return min(end - n_computed, self.max_rows)

    @property
    def next_span(self) -> Span | None:
        """The part of a medium that comes next; `None` if a token does."""
        n_computed = self.n_computed
        for span in self.spans:
            if n_computed < span.end:
                return span if span.start <= n_computed else None
        return None

    def can_continue_from(self, length: int) -> bool:
        """Whether it can continue after its first `length` tokens: not inside a part of a medium
        that is computed at once or whose rows share a position."""
        inside = (s for s in self.spans if s.start < length < s.end)
        return not any(span.chunk.at_once or span.n_still for span in inside)

    def position(self, index: int) -> int:
        """The position of its token at `index`, which is the first of a medium or in none."""
        return index - sum([span.n_still for span in self.spans if span.end <= index])

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of its prompt's tokens are wanted and were not sent yet."""
        return self.request.prompt_logprobs is not None and not self.is_scored

    @property
    def may_reuse(self) -> bool:
        """Whether cells of the same tokens may be reused for its first tokens."""
        if self.is_on_trial:  # what was kept meanwhile may hold NaN, too
            return False
        return not self.request.deterministic and not self.scores_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether all but its newest tokens are computed: several, if the sampler forced some."""
        n_computed, n_tokens = self.n_computed, len(self.tokens)
        return self.n_prompt <= n_computed >= n_tokens - MOST_NEW and n_tokens > self.n_prompt


@dataclass(frozen=True, slots=True)
class Awaited:
    """A prefix that a running sequence computes, and others wait for."""

    owner: Sequence
    length: int

    @property
    def is_due(self) -> bool:
        """Whether it is still being computed."""
        return self.owner.slot is not None and self.owner.n_computed < self.length
