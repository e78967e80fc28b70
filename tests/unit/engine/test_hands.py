"""Threads that draw side by side draw what one draws after another."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.support.real_engine import RealEngine
from worker.engine import hands
from worker.engine.hands import Hands
from worker.errors import InferenceFailed
from worker.llama.context import Context
from worker.llama.sampler import Sampler
from worker.wire.sampling import Constraint


def test_outcomes_are_in_the_order_of_the_draws_whoever_draws() -> None:
    several, threads = Hands(4), set[int]()

    def draw(at: int) -> int:
        threads.add(threading.get_ident())
        np.exp(np.ones(100_000))
        if at % 5 == 3:
            raise InferenceFailed(str(at))
        return at

    several.took(1.0, 1)
    found = several.draw([lambda at=at: draw(at) for at in range(40)])
    told = [int(str(each)) if isinstance(each, InferenceFailed) else each for each in found]
    assert told == list(range(40)) and sum(isinstance(e, InferenceFailed) for e in found) == 8
    assert len(threads) > 1
    assert several.draw([]) == []


def test_a_fault_in_a_draw_is_nobodys_token() -> None:
    several = Hands(2)
    several.took(1.0, 1)
    with pytest.raises(ZeroDivisionError):
        several.draw([lambda: 1, lambda: 1 // 0])


def test_little_work_is_nobody_elses() -> None:
    several = Hands(4)
    assert several.worth(64) == 1, "what a draw takes is not known yet"
    several.took(64 * 1e-6, 64)
    assert several.worth(64) == 1
    several.took(1.0, 1)
    assert several.worth(64) == 4 and several.worth(3) == 3
    assert Hands().worth(64) == 1


SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.7, "mirostat": 2},
    {"temperature": 0.8, "min_tokens": 20, "ignore_eos": True},
    {"temperature": 0.8, "typical_p": 0.7, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    {"temperature": 0.8, "dry_multiplier": 0.8},
)


def test_an_answer_does_not_depend_on_whose_hands_draw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All samplers at once, one of them under a constraint, whose draws stay on the engine's
    thread."""
    monkeypatch.setattr(hands, "_WORTH_SECONDS", 1e-9)
    texts, threads = [], set[str]()
    sample = Sampler.sample

    def watched(self: Sampler, context: Context, row: int) -> int:
        threads.add(threading.current_thread().name if self.draws_alone else "constrained")
        assert self.draws_alone or threading.current_thread() is threading.main_thread()
        return sample(self, context, row)

    monkeypatch.setattr(Sampler, "sample", watched)
    for count in (1, 4):
        engine = RealEngine(slots=len(SAMPLINGS) + 1, hands=Hands(count))
        ids = [
            engine.submit("Once upon a time", max_tokens=40, **{"seed": 7 + n, **sampling})
            for n, sampling in enumerate(SAMPLINGS)
        ]
        constraint = Constraint("start: /[a-z ]{30}/", "grammar")
        ids.append(engine.submit("Once upon a time", max_tokens=40, constraint=constraint))
        engine.run()
        texts.append([engine.text(each) for each in ids])
    assert texts[0] == texts[1] and all(texts[0])
    assert "constrained" in threads and any(name.startswith("draw") for name in threads)
