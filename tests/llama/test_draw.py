"""Draws against llama.cpp's own sampler chains: the same tokens, with the same probabilities.

A draw is a function of the logits and of one number from [0, 1). So its distribution is read off
by numbers that lie evenly, without chance.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from worker.errors import InferenceFailed
from worker.llama import library
from worker.llama.draw import Changes, Cut, dice, largest

Row = npt.NDArray[np.float32]
SMALL, BLOCKS = 700, 9_001
"""Vocabularies below and above what is summed in blocks."""
FORBIDDEN = np.float32(-np.inf)


def row(n_vocab: int, spread: float = 2.5, seed: int = 0) -> Row:
    return (np.random.default_rng(seed).standard_normal(n_vocab) * spread).astype(np.float32)


def native(logits: Row, cut: Cut) -> dict[int, float]:
    """What llama.cpp's samplers leave of the logits, as probabilities."""
    flat: Any = library.load()
    samplers = []
    if cut.top_k:
        samplers.append(flat.llama_sampler_init_top_k(cut.top_k))
    if cut.top_p < 1:
        samplers.append(flat.llama_sampler_init_top_p(cut.top_p, 1))
    if cut.min_p:
        samplers.append(flat.llama_sampler_init_min_p(cut.min_p, 1))
    samplers.append(flat.llama_sampler_init_temp(cut.temperature))
    kind = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    candidates = np.zeros(len(logits), kind)
    candidates["id"], candidates["logit"] = np.arange(len(logits)), logits
    data = candidates.ctypes.data_as(flat.llama_token_data_p)
    array = flat.llama_token_data_array(data, len(candidates), -1, False)
    for sampler in samplers:
        flat.llama_sampler_apply(sampler, ctypes.byref(array))
        flat.llama_sampler_free(sampler)
    left = candidates[: array.size]
    weights = np.exp(left["logit"].astype(np.float64) - left["logit"].max())
    return dict(zip(left["id"].tolist(), (weights / weights.sum()).tolist(), strict=True))


CUTS = [
    Cut(),
    Cut(temperature=0.6),
    Cut(temperature=3.0),
    Cut(0.8, 40, 0.95, 0.05),
    Cut(top_k=1),
    Cut(top_k=5),
    Cut(2.0, top_k=200),
    Cut(top_k=10**6),
    Cut(top_p=0.9),
    Cut(top_p=0.0),
    Cut(1.0, 300, 0.7),
    Cut(min_p=0.1),
    Cut(1.7, 0, 0.95, 0.01),
    Cut(min_p=1.0),
]


@pytest.mark.parametrize("n_vocab", [SMALL, BLOCKS])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_tokens_are_drawn_as_often_as_llama_cpp_would(n_vocab: int, cut: Cut) -> None:
    logits, n = row(n_vocab), 1200
    before = logits.copy()
    expected = native(logits, cut)
    drawn = Counter(cut.draw(logits, (i + 0.5) / n) for i in range(n))
    assert drawn.keys() <= expected.keys()
    # Evenly spaced numbers hit each token's interval as often as it is long, to one more or less;
    # where a token's interval is in pieces of rounding, to two.
    for token, share in expected.items():
        assert abs(drawn[token] - n * share) <= 2
    assert (logits == before).all(), "a draw changes nothing"


@pytest.mark.parametrize("cut", [Cut(top_p=0.95), Cut(top_p=0.999, temperature=0.5)], ids=str)
def test_a_nucleus_that_is_most_of_the_vocabulary(cut: Cut) -> None:
    flat_row = row(BLOCKS, spread=0.1)
    expected = native(flat_row, cut)
    drawn = {cut.draw(flat_row, (i + 0.5) / 400) for i in range(400)}
    assert drawn <= expected.keys()
    kept = cut._kept(flat_row)
    # Sums of thousands of equal weights end within rounding of each other.
    assert kept is not None and abs(len(kept) - len(expected)) <= 3


@pytest.mark.parametrize("count", [1, 3, 40, 699, 700, 5_000])
@pytest.mark.parametrize("n_vocab", [5, SMALL, BLOCKS])
def test_the_largest_are_the_largest(count: int, n_vocab: int) -> None:
    logits = row(n_vocab)
    assert logits[largest(logits, count)].tolist() == sorted(logits.tolist())[::-1][:count]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("n_vocab", [SMALL, BLOCKS])
def test_what_is_forbidden_is_never_drawn(n_vocab: int, cut: Cut) -> None:
    logits = np.full(n_vocab, FORBIDDEN)
    allowed = {3: 1.0, n_vocab // 2: -20.0, n_vocab - 1: 0.5}
    for token, logit in allowed.items():
        logits[token] = logit
    for number in (0.0, 1e-12, 0.3, 0.7, 1 - 2**-53):
        assert cut.draw(logits, number) in allowed
    logits[3] = logits[n_vocab - 1] = FORBIDDEN
    assert cut.draw(logits, 0.5) == n_vocab // 2


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_row_that_forbids_everything_ends_nothing(cut: Cut) -> None:
    with np.errstate(invalid="ignore"):
        assert 0 <= cut.draw(np.full(BLOCKS, FORBIDDEN), 0.5) < BLOCKS


def test_dice_are_even_and_those_of_neighbours_are_not_alike() -> None:
    n = 20_000
    for throws in (
        [dice(7, position) for position in range(n)],
        [dice(seed, 0) for seed in range(n)],
        [dice(7, 3, attempt) for attempt in range(n)],
        [dice(seed << 32, 5) for seed in range(n)],
    ):
        values = np.array(throws)
        assert 0 <= values.min() and values.max() < 1
        counts = np.histogram(values, 100, (0, 1))[0]
        # Chi-square of 99 degrees of freedom: beyond 190 once in ten million times.
        assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 190
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.04
    assert dice(2**64 - 1, 0) != dice(2**32 - 1, 0)


@pytest.mark.parametrize("penalties", [(1.3, 0.0, 0.0), (1.0, 0.4, 0.7), (0.0, -1.0, 2.0)])
def test_changes_are_llama_cpp_s_and_leave_no_trace(
    penalties: tuple[float, float, float],
) -> None:
    logits, prompt, said = row(SMALL), [5, 6, 7, 7, 9], [9, 11, 11, 400, *range(100, 300)]
    bias = {6: 2.0, 500: -3.0, 11: -1.0}
    changes = Changes(bias, *penalties, prompt)
    for token in said:
        changes.remember(token)
    before = logits.copy()
    changes.apply(logits)
    repetition, frequency, presence = penalties
    flat: Any = library.load()
    kind = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    candidates = np.zeros(SMALL, kind)
    candidates["id"], candidates["logit"] = np.arange(SMALL), before
    for token, value in bias.items():
        candidates["logit"][token] += np.float32(value)
    for text, parts in (
        (prompt + said, (max(repetition, 0.01), 0.0, 0.0)),
        (said, (1.0, frequency, presence)),
    ):
        sampler = flat.llama_sampler_init_penalties(SMALL, 1000, *parts)
        for token in text:
            flat.llama_sampler_accept(sampler, token)
        data = candidates.ctypes.data_as(flat.llama_token_data_p)
        array = flat.llama_token_data_array(data, SMALL, -1, False)
        flat.llama_sampler_apply(sampler, ctypes.byref(array))
        flat.llama_sampler_free(sampler)
    assert candidates["id"].tolist() == list(range(SMALL))
    np.testing.assert_allclose(logits, candidates["logit"], rtol=1e-5, atol=1e-5)
    changes.take_back(logits)
    assert (logits == before).all()


@pytest.mark.parametrize("cut", [*CUTS, Cut(temperature=0.0)], ids=str)
@pytest.mark.parametrize("n_vocab", [SMALL, BLOCKS])
def test_a_row_with_nan_is_an_error_of_the_model(cut: Cut, n_vocab: int) -> None:
    for place in (0, n_vocab // 2, n_vocab - 1):
        logits = row(n_vocab)
        logits[place] = np.nan
        with pytest.raises(InferenceFailed, match="NaN: its weights"):
            cut.draw(logits, 0.5)
    with pytest.raises(InferenceFailed, match="NaN: its weights"):
        cut.draw(np.full(n_vocab, np.nan, np.float32), 0.5)
