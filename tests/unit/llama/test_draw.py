"""Draws against llama.cpp's own sampler chains: the same tokens, with the same probabilities.

A draw is a function of the logits and of one number from [0, 1). So evenly spaced numbers measure
its distribution without randomness.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from tests.unit.llama.native_chain import FORBIDDEN, Row, applied, left_by, native_chain, row
from worker.llama.chain import Chain, Kept, Undo, top_p
from worker.llama.draw import NotANumber, dice, largest
from worker.llama.penalties import Penalties
from worker.wire.sampling import Sampling

SMALL, BLOCKS = 700, 9_001
"""Vocabularies below and above the size that is summed in blocks."""


def native(logits: Row, sampling: Sampling) -> dict[int, float]:
    """Return the result of llama.cpp's samplers, as probabilities."""
    with native_chain(sampling, (), len(logits)) as chain:
        return applied(chain, logits)[0]


def cut(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Sampling:
    return Sampling(0, temperature, top_k, top_p, min_p)


def chain_of(sampling: Sampling) -> Chain:
    return Chain(sampling, {}, Undo(), 0)


CUTS = [
    cut(),
    cut(temperature=0.6),
    cut(temperature=3.0),
    cut(0.8, 40, 0.95, 0.05),
    cut(top_k=1),
    cut(top_k=5),
    cut(2.0, top_k=200),
    cut(top_k=10**6),
    cut(top_p=0.9),
    cut(top_p=0.0),
    cut(1.0, 300, 0.7),
    cut(min_p=0.1),
    cut(1.7, 0, 0.95, 0.01),
    cut(min_p=1.0),
]


@pytest.mark.parametrize("n_vocab", [SMALL, BLOCKS])
@pytest.mark.parametrize("sampling", CUTS, ids=str)
def test_cuts_have_the_distribution_of_llama_cpp(n_vocab: int, sampling: Sampling) -> None:
    logits, n = row(n_vocab), 1200
    before = logits.copy()
    expected = native(logits, sampling)
    drawn = Counter(chain_of(sampling).draw(logits, (i + 0.5) / n) for i in range(n))
    assert drawn.keys() <= expected.keys()
    # Evenly spaced numbers hit each token's interval as often as it is long, to one more or less;
    # where a token's interval is in pieces of rounding, to two.
    for token, share in expected.items():
        assert abs(drawn[token] - n * share) <= 2
    assert (logits == before).all(), "a draw changes nothing"


@pytest.mark.parametrize("sampling", [cut(top_p=0.95), cut(top_p=0.999, temperature=0.5)], ids=str)
def test_a_nucleus_of_most_of_the_vocabulary_equals_llama_cpp_s(sampling: Sampling) -> None:
    flat_row = row(BLOCKS, spread=0.1)
    expected = native(flat_row, sampling)
    drawn = {chain_of(sampling).draw(flat_row, (i + 0.5) / 400) for i in range(400)}
    assert drawn <= expected.keys()
    kept = top_p(sampling.top_p, 0, Kept(flat_row, None, False, BLOCKS))
    # Sums of thousands of equal weights are equal up to rounding.
    assert abs(kept.size - len(expected)) <= 3


@pytest.mark.parametrize("count", [1, 3, 40, 699, 700, 5_000])
@pytest.mark.parametrize("n_vocab", [5, SMALL, BLOCKS])
def test_the_largest_are_the_largest(count: int, n_vocab: int) -> None:
    logits = row(n_vocab)
    assert logits[largest(logits, count)].tolist() == sorted(logits.tolist())[::-1][:count]


@pytest.mark.parametrize("sampling", CUTS, ids=str)
@pytest.mark.parametrize("n_vocab", [SMALL, BLOCKS])
def test_a_forbidden_token_is_never_drawn(n_vocab: int, sampling: Sampling) -> None:
    logits = np.full(n_vocab, FORBIDDEN)
    allowed = {3: 1.0, n_vocab // 2: -20.0, n_vocab - 1: 0.5}
    for token, logit in allowed.items():
        logits[token] = logit
    for number in (0.0, 1e-12, 0.3, 0.7, 1 - 2**-53):
        assert chain_of(sampling).draw(logits, number) in allowed
    logits[3] = logits[n_vocab - 1] = FORBIDDEN
    assert chain_of(sampling).draw(logits, 0.5) == n_vocab // 2


def test_dice_are_uniform_and_not_correlated() -> None:
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
@pytest.mark.parametrize("last_n", [None, -1, 0, 1, 30, 100_000])
def test_penalties_are_llama_cpp_s_and_leave_no_trace(
    penalties: tuple[float, float, float], last_n: int | None
) -> None:
    """Without a window, repetition counts prompt and answer, the others only the answer."""
    logits, prompt, answer = row(SMALL), [5, 6, 7, 7, 9], [9, 11, 11, 400, *range(100, 300)]
    before, undo = logits.copy(), Undo()
    repetition, frequency, presence = penalties
    sampling = Sampling(
        0,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repeat_last_n=last_n,
    )
    step = Penalties(sampling, prompt, undo)
    for token in answer:
        step.remember(token)
    step(Kept(logits, None, False, SMALL))
    window = 1000 if last_n is None or last_n < 0 else last_n
    counted = [(prompt + answer, penalties)]
    if last_n is None:
        counted = [(prompt + answer, (repetition, 0.0, 0.0)), (answer, (1.0, frequency, presence))]
    expected = before
    for text, parts in counted:
        native = Sampling(0, 1.0, 0, 1.0, 0.0, repeat_last_n=window, samplers=("penalties",))
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        native = replace(native, **dict(zip(names, (max(parts[0], 0.01), *parts[1:]), strict=True)))
        with native_chain(native, text, SMALL) as chain:
            expected = left_by(chain, expected)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)
    undo.take_back()
    assert (logits == before).all()


@pytest.mark.parametrize(
    "sampling",
    [*CUTS, cut(temperature=0.0), *(replace(cut(), mirostat=version) for version in (1, 2))],
    ids=str,
)
@pytest.mark.parametrize("n_vocab", [SMALL, BLOCKS])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_without_a_largest_number_is_an_error_of_the_model(
    sampling: Sampling, n_vocab: int, value: float
) -> None:
    for place in (0, n_vocab // 2, n_vocab - 1):
        logits = row(n_vocab)
        logits[place] = value
        with pytest.raises(NotANumber, match="NaN or infinity: its weights"):
            chain_of(sampling).draw(logits, 0.5)
    for everywhere in value, -np.inf:
        with pytest.raises(NotANumber, match="NaN or infinity: its weights"):
            chain_of(sampling).draw(np.full(n_vocab, everywhere, np.float32), 0.5)
