"""How a step's prompts fit the tiles of the attention on a CPU: 64 rows of one sequence."""

from __future__ import annotations

import pytest

from tests.support.byte_backend import ByteBackend, make_sequence
from tests.unit.engine.test_loop import Engine
from worker.engine.pace import TILE_TOKENS
from worker.engine.prompts import in_whole_tiles, neighbours
from worker.engine.step import Chunk


def prompt(n_left: int, n_tokens: int, slot: int = 0) -> Chunk:
    """A chunk of `n_tokens` of a prompt with `n_left` tokens to compute."""
    sequence = make_sequence(ByteBackend(8, 8192, 8192, 512), slot, bytes(n_left))
    sequence.slot = slot
    return Chunk(sequence, 0, n_tokens)


def sizes(chunks: list[Chunk], room: int = 512, n_beside: int = 0, *giving: int) -> list[int]:
    fitted = in_whole_tiles(chunks, room, n_beside=n_beside, giving=set(giving))
    return [chunk.n_tokens for chunk in fitted]


def test_alone_a_prompt_fills_tiles() -> None:
    assert sizes([prompt(1000, 256)]) == [256]


def test_a_prompt_gives_a_row_to_the_pass_of_its_neighbours() -> None:
    assert sizes([prompt(1000, 64)], 512, 0, 0) == [65]
    assert sizes([prompt(1000, 128, 3), prompt(1000, 64, 6)], 512, 0, 6) == [128, 65]


@pytest.mark.parametrize(("n_beside", "n_tokens"), [(1, 63), (8, 56), (32, 96), (40, 88), (64, 64)])
def test_in_one_pass_decode_rows_are_part_of_a_tile(n_beside: int, n_tokens: int) -> None:
    assert sizes([prompt(1000, 64)], 512, n_beside) == [n_tokens]
    assert (n_tokens + n_beside) % TILE_TOKENS == 0


def test_the_rest_of_a_prompt_comes_with_its_last_tile() -> None:
    assert sizes([prompt(100, 64)]) == [100]
    assert sizes([prompt(300, 256)]) == [192], "and 108 in the next step"
    assert sizes([prompt(128, 64)]) == [64]


def test_less_than_half_a_tile_of_a_further_prompt_waits() -> None:
    assert sizes([prompt(900, 64), prompt(900, 20, 1)]) == [64]
    assert sizes([prompt(900, 59), prompt(5, 5, 1)]) == [64, 5]


def test_a_step_has_no_more_tokens_than_there_is_room() -> None:
    assert sizes([prompt(100, 64, slot) for slot in range(8)], 256) == [100, 100, 56]


def test_neighbours_are_found_across_other_prompts() -> None:
    assert neighbours({2, 3, 6}, {1}) == {2, 3}
    assert neighbours({2}, {0, 4}) == set()


def test_the_scheduler_fits_prompts_to_tiles() -> None:
    engine = Engine(batch=512, prefill_budget=128, tiled=True)
    engine.submit(1, b"abc", max_tokens=60)
    engine.turn()
    engine.scheduler.pace.measured(1, 0, 0.02)
    engine.scheduler.pace.measured(1, 128, 0.03)
    engine.submit(2, bytes(90), max_tokens=1)
    engine.run()
    prompts = [n for batch in engine.backend.batches for r, _, n in batch if r == 2]
    assert prompts == [90], "no rest of an incomplete tile"
