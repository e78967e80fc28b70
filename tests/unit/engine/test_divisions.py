"""A pool that is divided into parts as long as these are enough."""

from __future__ import annotations

from tests.support.byte_backend import expected_answer
from tests.unit.engine.test_loop import CONTEXT, Engine

SHORT, LONG = b"a short prompt of thirty letters", bytes(range(97, 123)) * 3


def divided_engine(memory_bytes: int = 2000) -> Engine:
    """Four parts of 50 cells, two of 100, or 200 cells in one pool."""
    return Engine(
        4, 200, unified=True, divisions=(4, 2), memory_bytes=memory_bytes, prefill_budget=24
    )


def n_slots(engine: Engine) -> list[int]:
    """Of the layouts that the engine has changed to, beginning with the first."""
    return [0 if each.unified else each.n_slots for each in engine.backend.layouts]


def check_answers(engine: Engine, prompts: dict[int, bytes], max_tokens: int = 16) -> None:
    for request_id, prompt in prompts.items():
        expected = expected_answer(prompt, max_tokens, CONTEXT)
        assert engine.text(request_id).encode() == expected


def test_parts_last_as_long_as_all_fit() -> None:
    engine = divided_engine()
    prompts = {n: SHORT[: 10 + n] for n in range(6)}
    for request_id, prompt in prompts.items():
        engine.submit(request_id, prompt)
    engine.run()
    check_answers(engine, prompts)
    assert n_slots(engine) == [4]


def test_a_long_prompt_gets_a_longer_part_and_streams_go_on_from_their_cells() -> None:
    engine = divided_engine()
    prompts = {0: SHORT[:20], 1: SHORT[3:20]}
    for request_id, prompt in prompts.items():
        engine.submit(request_id, prompt)
    for _ in range(6):
        engine.turn()
    prompts[2] = LONG
    engine.submit(2, LONG)
    engine.run()
    check_answers(engine, prompts)
    assert n_slots(engine) == [4, 2]
    n_rows = sum(n for batch in engine.backend.batches for _, _, n in batch)
    assert n_rows <= sum(len(prompt) + 16 for prompt in prompts.values()), "nothing twice"


def test_one_pool_serves_what_fits_in_no_part() -> None:
    engine = divided_engine()
    prompts = {0: SHORT[:20], 1: bytes(97 + n % 7 for n in range(150))}
    for request_id, prompt in prompts.items():
        engine.submit(request_id, prompt)
    engine.run()
    check_answers(engine, prompts)
    assert n_slots(engine) == [4, 0]


def test_one_alone_stays_where_it_is() -> None:
    engine = divided_engine()
    long = bytes(97 + n % 7 for n in range(150))
    for request_id, prompt in {0: long, 1: SHORT, 2: long}.items():
        engine.submit(request_id, prompt)
        engine.run()
    assert n_slots(engine) == [4, 0]
    engine.submit(3, SHORT)
    engine.submit(4, SHORT)
    engine.run()
    assert n_slots(engine) == [4, 0, 4], "where two would be in each other's way"


def test_idle_conversations_outlive_a_change_in_memory() -> None:
    engine = divided_engine()
    first = bytes(97 + n % 11 for n in range(40))
    engine.submit(0, first, max_tokens=1)
    engine.run()
    engine.submit(1, LONG)
    engine.run()
    engine.backend.batches.clear()
    engine.submit(2, first + b"and on", max_tokens=1)
    engine.run()
    n_computed = sum(n for batch in engine.backend.batches for _, _, n in batch)
    assert n_computed < len(first), "its beginning came back from memory"
