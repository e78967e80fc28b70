"""What a dialect implements to serve generations: its one interface with `chat/`.

A dialect is a pydantic model of its body and two more things, which `run.respond` puts together:

- `read(body, state)`: turns the body into a `Generate`, or into a `ModelOnly` if there is nothing
  to generate. It raises `InvalidRequest` for rules that the pydantic model cannot express. It may
  run on another thread.
- a subclass of `Answer`: `encode` turns each delta into bytes of a stream, `whole` the finished
  choices into the value of a whole answer. Both see the same deltas, so they cannot differ. A
  stream of blocks, as of Anthropic's messages and OpenAI's responses, is a `BlockAnswer`.

Its operations and the form of its errors are in its `http.operation.Dialect`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel

from worker.api.chat.choice import Block, Choice
from worker.api.chat.delta import Arguments, Delta, Reasoning, Text
from worker.api.chat.request import Generate
from worker.api.chat.scored import count_scores
from worker.api.http.encoding import sse
from worker.api.http.operation import SSE, StreamForm
from worker.api.http.state import AppState
from worker.errors import WorkerError
from worker.wire.messages import Finished, Started

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ModelOnly:
    """A request only to load or to unload the model, which generates nothing."""

    answer: object
    is_wanted: bool
    """Whether to load the model. A request to unload it has no effect."""


Read = Callable[[Body, AppState], Generate | ModelOnly]


@dataclass
class Answer(ABC, Generic[Body]):
    """The answer to one request, streamed or whole. Runs on the event loop; a thread encodes many
    log-probabilities."""

    media_type: ClassVar[str] = f"{SSE}; charset=utf-8"
    """The media type of a stream."""
    form: ClassVar[StreamForm]
    """How a stream ends."""

    body: Body
    asked: Generate
    choices: Sequence[Choice]
    """Choice i belongs to prompt i // `asked.n`."""
    state: AppState

    def __post_init__(self) -> None:
        """Set up the dialect's own state, if it has any."""

    @abstractmethod
    def encode(self, choice: Choice, delta: Delta) -> bytes:
        """The bytes that a delta adds to a stream, if any. `choice` already includes it."""

    @property
    def has_ended(self) -> bool:
        """Whether every choice has finished."""
        return all(choice.finished is not None for choice in self.choices)

    def n_scores(self, delta: Delta) -> int:
        """How many log-probabilities a delta adds to a stream. Its choice already includes it."""
        return count_scores(getattr(delta, "logprobs", ()))

    def failure(self, error: WorkerError) -> bytes:
        """The end of a stream whose job failed."""
        return self.form.failure(error, b"", b"")

    def is_numbered(self, event: bytes) -> bool:
        """Whether an event gets an id, 0, 1, 2…, in a stream that a reader can resume."""
        return True

    @abstractmethod
    def whole(self) -> Any:
        """The whole answer as JSON, once all choices have finished."""


# --- streams in blocks that begin, grow and end one after the other -----------------------

Event = dict[str, Any]
BlockStep = Literal["start", "delta", "stop"]


class BlockAnswer(Answer[Body]):
    """An answer of one choice, streamed in blocks; the dialect defines their events."""

    def __post_init__(self) -> None:
        [self.choice] = self.choices
        self._n_begun = 0

    def encode(self, choice: Choice, delta: Delta) -> bytes:
        return b"".join(map(self.encoded, self._events(delta)))

    def encoded(self, event: Event) -> bytes:
        return sse(event)

    def ends_block(self, delta: Delta) -> bool:
        return len(self.choice.blocks) > self._n_begun or isinstance(delta, Finished)

    def _events(self, delta: Delta) -> Iterator[Event]:
        blocks, n_begun = self.choice.blocks, self._n_begun
        if n_begun and self.ends_block(delta):
            yield from self.step_events("stop", n_begun - 1, blocks[n_begun - 1], "")
        if len(blocks) > n_begun:
            self._n_begun = len(blocks)
            yield from self.step_events("start", n_begun, blocks[n_begun], "")
        match delta:
            case Text(text) | Reasoning(text) | Arguments(_, text) if text:
                yield from self.step_events("delta", self._n_begun - 1, blocks[-1], text)
            case Started():
                yield from self.first_events()
            case Finished():
                yield from self.last_events()

    @abstractmethod
    def first_events(self) -> Iterable[Event]: ...

    @abstractmethod
    def step_events(self, what: BlockStep, index: int, block: Block, text: str) -> Iterable[Event]:
        """The events of one step of a block, which is number `index` of the answer. `text` is what
        a delta adds."""

    @abstractmethod
    def last_events(self) -> Iterable[Event]: ...
