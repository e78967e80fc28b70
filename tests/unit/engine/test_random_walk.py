"""Requests that arrive, continue, are cancelled, preempted and replayed, at random: after every
step the cache's books match the runner, and in the end each text equals the one computed alone.

The same walk runs on the byte model and on llama.cpp, for each kind of memory, in a split pool and
in one, with and without files.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from msgspec.structs import replace

from tests.support.byte_runner import expected_answer
from tests.support.random_adapters import random_adapters
from tests.support.random_models import Kind, random_model
from tests.support.real_engine import RealEngine
from tests.unit.engine.test_forced import constraint
from tests.unit.engine.test_loop import CONTEXT, Engine
from tests.unit.engine.test_memory_kinds import ANSWER, Alone
from tests.unit.engine.test_reasoning import WISH
from tests.unit.engine.test_speculation import Prophet, guess_always
from worker.engine.sequence import Sequence
from worker.engine.speculation.speculation import Guess
from worker.errors import Cancelled, VramOom
from worker.wire.adapters import Applied
from worker.wire.messages import Event, Failed, Finished, Token

KINDS: list[Kind] = ["dense", "windowed", "hybrid", "recurrent", "convolved"]
N_BACK = {"convolved": 7}
"""How many tokens can be taken back from a memory that cannot be cut."""
BYTE_KINDS = {
    "dense": {},
    "windowed": {"window": 12},
    "recurrent": {"recurrent": True},
    "taking back": {"recurrent": True, "most_back": 5},
}
STOPS = ("ab", "e", "zqa", *(f"{letter}!" for letter in "ghijklmnopq"))
Cells = Literal["parts", "one pool", "divided"]
"""A part for each slot, one pool, or a pool that is divided while its parts are long enough."""
LAYOUTS: list[tuple[Cells, bool]] = [
    (cells, stores) for cells in get_args(Cells) for stores in (False, True)
]
"""The layout of the cells, and whether there are files."""
OPTIONS: list[dict[str, Any]] = [
    *({}, {}, {"logprobs": 1}, {"min_tokens": 9, "repetition_penalty": 1.3}, {"is_seeded": True}),
    *({"dry_multiplier": 0.8, "dry_allowed_length": 1}, {"temperature": 0.9, "top_k": 1}),
    *({"constraint": constraint(seed)} for seed in range(4)),
    *({"reasoning": replace(WISH, goes_on=True, budget=budget)} for budget in (0, 7)),
]
"""Options of requests to llama.cpp; constrained answers and closed reasoning have forced tokens."""
ADAPTERS: list[Applied] = [(), (), ((0, 1.0),), ((1, 1.0),), ((0, 0.5), (1, 1.0))]


def cases(kinds: Iterable[str]) -> list[tuple[Any, tuple[Cells, bool]]]:
    """Return the layouts of each kind of memory; only dense models change the division."""
    return [
        (kind, layout)
        for kind in kinds
        for layout in LAYOUTS
        if layout[0] != "divided" or kind == "dense"
    ]


@dataclass(eq=False)
class Request:
    """One request, over all engines that have served it."""

    prompt: tuple[int, ...]
    max_tokens: int
    cache_salt: str | None
    deterministic: bool
    adapters: Applied = ()
    option: int = 0
    """The index of its other options, which each kind of engine interprets."""
    request_id: int = -1
    produced: list[int] = field(default_factory=list)
    """The tokens from earlier engines."""
    text: str = ""
    """The text from earlier engines."""
    is_over: bool = False


class Walk:
    """A walk on one kind of engine; `folder` is for its files."""

    n_common, n_own, n_out, context = (34, 60), (1, 20), (1, 20), CONTEXT
    first_token, n_tokens = 97, 26

    def __init__(self, seed: int, folder: Path | None) -> None:
        self.choose, self.folder = random.Random(seed), folder
        self.begun = [self.some(self.choose.randint(*self.n_common)) for _ in range(3)] + [()]
        self.requests: list[Request] = []
        self.engine = self.start()

    # --- specific to each of the two kinds of engines --------------------------------------

    def start(self) -> Engine | RealEngine:
        raise NotImplementedError

    def ask(self, request: Request) -> None:
        raise NotImplementedError

    def fault(self, request: Request, produced: list[int]) -> str | None:
        """Return the error in an answer, whose end may be missing."""
        raise NotImplementedError

    def end(self) -> None:
        """Stop the engine, as a crash does."""

    def disturb(self) -> None:
        """Make the next batch fail in some way."""

    def abort(self) -> None:
        """Compute a batch until the cancel of a prompt aborts it."""

    # --- the walk ------------------------------------------------------------------------------

    def some(self, n_tokens: int) -> tuple[int, ...]:
        first, last = self.first_token, self.first_token + self.n_tokens - 1
        return tuple(self.choose.randint(first, last) for _ in range(n_tokens))

    def go(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self.step()
            self.engine.turn()  # and compares the books
            self.take_in()
        for _ in range(20_000):
            if all(request.is_over for request in self.requests):
                break
            if not self.engine.scheduler.has_work:
                time.sleep(0.001)  # a file is being read
            self.engine.turn()
            self.take_in()
        assert all(request.is_over for request in self.requests), "some do not end"
        assert not self.engine.scheduler.has_work and not self.engine.scheduler.waiting
        assert self.engine.cache.cells_running == 0
        assert self.engine.cache.memory.locked_bytes == 0 or self.folder is not None
        self.end()

    def step(self) -> None:
        choose, live = self.choose, [request for request in self.requests if not request.is_over]
        dice, is_calm = choose.random(), len(self.requests) % 9 > 4  # then streams also run alone
        if dice < (0.05 if is_calm else 0.25) and len(live) < 12:
            self.arrive(live)
        elif 0.25 < dice < 0.29 and live:
            self.cancel([choose.choice(live)])
        elif 0.29 < dice < 0.295:
            self.end()
            self.engine = self.start()
            for request in live:
                request.produced += self.ids(request)
                request.text += self.engine.text(request.request_id)
                self.ask(request)
        elif 0.295 < dice < 0.32:
            self.disturb()
        elif 0.32 < dice < 0.37:  # one arrives alone, and leaves
            self.cancel(live)
            self.engine.turn()
            self.take_in()
            self.arrive([])
            self.cancel(self.requests[-1:])

    def cancel(self, several: list[Request]) -> None:
        if self.choose.random() < 0.5:
            self.abort()
        for request in several:
            self.engine.loop.cancel(request.request_id)

    def arrive(self, live: list[Request]) -> None:
        choose = self.choose
        conversations = [each.prompt + tuple(each.produced + self.ids(each)) for each in live[:2]]
        prompt = choose.choice(self.begun + conversations) + self.some(choose.randint(*self.n_own))
        n_out = choose.randint(*self.n_out)
        salt = choose.choice([None, None, "a"])
        is_alone, adapters = choose.random() < 0.08, choose.choice(ADAPTERS)
        prompt, option = prompt[: self.context - n_out - 1], choose.randrange(len(OPTIONS))
        request = Request(prompt, n_out, salt, is_alone, adapters, option)
        self.requests.append(request)
        self.ask(request)

    def take_in(self) -> None:
        for request in self.requests:
            if request.is_over or not self.events(request):
                continue
            last = self.events(request)[-1]
            if not isinstance(last, Finished | Failed):
                continue
            produced = request.produced + self.ids(request)
            request.is_over = True
            if isinstance(last, Failed):
                assert isinstance(last.error, Cancelled | VramOom), last.error
            assert (fault := self.fault(request, produced)) is None, fault
            if isinstance(last, Finished):
                self.begun.append(request.prompt + tuple(produced))  # for the next turn
                self.begun = self.begun[-7:]

    def events(self, request: Request) -> list[Event]:
        return self.engine.events[request.request_id]

    def ids(self, request: Request) -> list[int]:
        return self.engine.ids(request.request_id)


class ByteWalk(Walk):
    def __init__(self, seed: int, folder: Path | None, kind: str, *, cells: Cells) -> None:
        self.kind, self.cells, self.next_id = kind, cells, 0
        super().__init__(seed, folder)

    def start(self) -> Engine:
        choose = self.choose
        n_slots = choose.choice([2, 3, 5] if self.cells == "divided" else [1, 2, 4])
        engine = Engine(
            n_slots=n_slots,
            n_cells=choose.randint(CONTEXT + 1, 3 * CONTEXT),
            unified=self.cells != "parts",
            divisions=(n_slots, n_slots - 1) if self.cells == "divided" else (),
            memory_bytes=choose.choice([0, 300, 2000]),
            folder=self.folder,
            prefill_budget=choose.choice([8, 24, 32]),
            drafter=Prophet(choose.randrange(99), computes=choose.random() < 0.3),
            **BYTE_KINDS[self.kind],  # type: ignore[arg-type]
        )
        if engine.loop.speculation is not None:
            guess_always(engine, choose)
        engine.scheduler.pace.seconds_per_prompt_token = choose.choice([0.0, 1.0])
        return engine

    def ask(self, request: Request) -> None:
        assert isinstance(self.engine, Engine)
        self.next_id += 1
        request.request_id = self.next_id
        self.engine.submit(
            self.next_id,
            bytes(request.prompt),
            max_tokens=request.max_tokens,
            cache_salt=request.cache_salt,
            deterministic=request.deterministic,
            adapters=request.adapters,
            produced=tuple(request.produced),
            sent_chars=len(request.text),
            most_given=request.option * (request.option % 3),
            **self.ends(request),
        )

    @staticmethod
    def ends(request: Request) -> dict[str, Any]:
        """Return the stops of some requests, some of which never match but hold text back, and the
        number of tokens before which none counts. Some want log-probabilities."""
        odd, even = request.option % 2, request.option % 4 == 2
        logprobs = None if request.option % 3 else 0
        return {"stop": STOPS if odd or even else (), "min_tokens": 9 * even, "logprobs": logprobs}

    def fault(self, request: Request, produced: list[int]) -> str | None:
        ends, n_most = self.ends(request), request.max_tokens
        expected = expected_answer(request.prompt, n_most, self.context, request.adapters).decode()
        text = request.text + self.engine.text(request.request_id)
        last = self.events(request)[-1]
        first = max(ends["min_tokens"] - 1, 0)
        found = [(at + len(s), at) for s in ends["stop"] if (at := expected.find(s, first)) >= 0]
        if found:
            expected = expected[: min(found)[1]]
        whole = isinstance(last, Failed) or text == expected == "".join(map(chr, produced))
        begins = [
            entry.begin
            for event in self.events(request)
            if isinstance(event, Token | Finished)
            for entry in event.logprobs
        ]
        in_order = begins == list(range(len(request.produced), len(request.produced) + len(begins)))
        is_right = expected.startswith(text) and whole and in_order
        return None if is_right else f"{request}: {text} by {produced}, not {expected}"

    def disturb(self) -> None:
        assert isinstance(self.engine, Engine)
        if self.engine.cache.limits.unified and len(self.engine.scheduler.running) > 2:
            self.engine.runner.outcomes = ["no_room"]
        elif self.choose.random() < 0.3:
            self.engine.runner.outcomes = ["failed"]
        elif not self.engine.recurrent:
            self.engine.runner.outcomes = ["aborted"]

    def abort(self) -> None:
        assert isinstance(self.engine, Engine)
        if not self.engine.recurrent:
            self.engine.runner.outcomes = ["aborted"]
            self.engine.turn()
            self.take_in()


class RealWalk(Walk):
    n_common, n_own, n_out, context = (36, 120), (40, 80), (1, ANSWER), 300
    first_token, n_tokens = 300, 600

    def __init__(self, seed: int, folder: Path | None, kind: Kind, *, cells: Cells) -> None:
        self.adapters = random_adapters(random_model(kind))
        self.kind, self.cells = kind, cells
        self.alone = Alone(kind, self.adapters, OPTIONS)
        super().__init__(seed, folder)

    def start(self) -> RealEngine:
        engine = RealEngine(
            4,
            path=random_model(self.kind),
            adapters=self.adapters,
            flash_attention="off",
            kv_unified=self.cells != "parts",
            divisions=(4, 2) if self.cells == "divided" else (),
            n_cells={"parts": None, "one pool": 512, "divided": 1024}[self.cells],
            prefill_budget=80,
            store=self.folder,
            memory_bytes=self.choose.choice([0, 1 << 18, 1 << 24]),
            drafter=Teller(self),
            n_back=N_BACK.get(self.kind, 0),
            batch=self.choose.choice([96, 2048]),
        )
        if engine.loop.speculation is not None:
            guess_always(engine, self.choose)
        return engine

    def ask(self, request: Request) -> None:
        assert isinstance(self.engine, RealEngine)
        request.request_id = self.engine.submit(
            request.prompt,
            max_tokens=request.max_tokens,
            cache_salt=request.cache_salt,
            deterministic=request.deterministic and self.cells == "parts",
            adapters=request.adapters,
            produced=tuple(request.produced),
            ignore_eos=True,
            **OPTIONS[request.option],
        )

    def fault(self, request: Request, produced: list[int]) -> str | None:
        last, options = self.events(request)[-1], OPTIONS[request.option]
        is_short = isinstance(last, Finished) and last.tokens_out != request.max_tokens
        if is_short and "constraint" not in options:
            return f"{len(produced)} of {request.max_tokens} tokens"
        return self.alone.differs(request.prompt, produced, request.adapters, request.option)

    def end(self) -> None:
        self.engine.close()  # type: ignore[union-attr]


class Teller(Prophet):
    """Guesses the answers computed alone, right up to a chosen token."""

    def __init__(self, walk: RealWalk) -> None:
        super().__init__(walk.choose.randrange(99))
        self._walk = walk

    def guess(self, sequence: Sequence, most: int) -> list[Guess]:
        live = (request for request in self._walk.requests if not request.is_over)
        (request,) = (each for each in live if each.request_id == sequence.request_id)
        expected, _ = self._walk.alone.answer(request.prompt, request.adapters, request.option)
        n_right = self._random.randint(0, most)
        coming = enumerate(expected[sequence.n_out :][:most])
        return [Guess(token if n < n_right else token ^ 1, 0) for n, token in coming]


@pytest.mark.parametrize("n_steps", [600, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize(("kind", "layout"), cases(BYTE_KINDS))
def test_a_walk_on_the_byte_model(
    kind: str, layout: tuple[Cells, bool], n_steps: int, tmp_path: Path
) -> None:
    cells, stores = layout
    for seed in range(3):
        own = tmp_path / str(seed) if stores else None
        ByteWalk(seed, own, kind, cells=cells).go(n_steps // 3)


def quick_and_long() -> Iterator[Any]:
    """Dense models in every layout; other kinds in parts with files, and in one pool without. The
    long walks cover all."""
    for kind, (cells, stores) in cases(KINDS):
        if kind == "dense" or stores == (cells == "parts"):
            yield kind, (cells, stores), 60
        yield pytest.param(kind, (cells, stores), 10_000, marks=pytest.mark.long)


@pytest.mark.parametrize(("kind", "layout", "n_steps"), [*quick_and_long()])
def test_a_walk_on_llama_cpp(
    kind: Kind, layout: tuple[Cells, bool], n_steps: int, tmp_path: Path
) -> None:
    cells, stores = layout
    walk = RealWalk(11, tmp_path if stores else None, kind, cells=cells)
    walk.go(n_steps)
