"""A request's chain against llama.cpp's own samplers: the same tokens with the same probabilities,
for every sampler and for random orders.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from tests.support import clock
from tests.support.bundled import bundled_gguf
from tests.unit.llama.native_chain import FORBIDDEN, Row, applied, native_chain, row
from worker.llama import library
from worker.llama.chain import Chain, Kept, Undo, infill
from worker.llama.draw import dice
from worker.llama.model import Model
from worker.llama.penalties import Bias, Dry, Penalties, breakers_of
from worker.wire.sampling import DEFAULT_BREAKERS, ORDER, SAMPLERS, Sampling


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    model = Model(str(bundled_gguf("f32")))
    yield model
    model.close()


def chain_of(
    sampling: Sampling, produced: Sequence[int], n_vocab: int, model: Model | None = None
) -> Chain:
    undo = Undo()
    changes: dict[str, Any] = {}
    if sampling.logit_bias:
        changes["bias"] = Bias({int(token): added for token, added in sampling.logit_bias}, undo)
    punished = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    if punished != (1.0, 0.0, 0.0) and sampling.repeat_last_n != 0:
        changes["penalties"] = Penalties(sampling, produced, undo)
    if model is not None and sampling.dry_multiplier and sampling.dry_penalty_last_n != 0:
        breakers = breakers_of(model, sampling.dry_sequence_breakers)
        changes["dry"] = Dry(sampling, produced, breakers, n_vocab, undo)
    if model is not None and "infill" in sampling.samplers:
        changes["infill"] = partial(infill, model)
    return Chain(sampling, changes, undo, n_vocab)


def shares(chain: Chain, logits: Row, chance: float = 0.0) -> dict[int, float]:
    """Return the chain's distribution as token → probability."""
    token = chain.draw(logits, 0.5, chance)
    _, top = chain.log_probabilities(token, len(logits))
    return {token: math.exp(logprob) for token, logprob in top}


def assert_alike(found: dict[int, float], expected: dict[int, float]) -> None:
    difference = {t: abs(found.get(t, 0.0) - expected.get(t, 0.0)) for t in found.keys() | expected}
    assert sum(difference.values()) < 2e-4, sorted(difference.items(), key=lambda d: -d[1])[:5]


ACTIVE: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "dynamic temperature": {"temperature": 0.9, "dynatemp_range": 0.5, "dynatemp_exponent": 1.3},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.07},
    "typ_p": {"typical_p": 0.7},
    "top_n_sigma": {"top_n_sigma": 1.2},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.01},
    "penalties": {
        "repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": 0.2,
        "repeat_last_n": 40,
    },
    "dry": {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_penalty_last_n": 60},
    "logit_bias": {"logit_bias": ((3, 4.0), (9, -3.0))},
    "adaptive_p": {
        "adaptive_target": 0.1, "min_p": 0.02,
        "samplers": ("penalties", "min_p", "adaptive_p", "temperature"),
    },
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 3.0, "temperature": 0.9},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 3.0, "temperature": 0.9},
}  # fmt: skip
"""Each sampler alone, turned on."""
PRODUCED = [*range(20), 5, 6, 7, 8, 9, 3, 1, 2, *range(30, 60), 5, 6, 7]


def defined(sampling: Sampling) -> Sampling:
    """Remove typical_p if llama.cpp's would take the logarithm of 0 for a token that an earlier
    step forbids: its order then depends on how NaN is sorted."""
    names = sampling.samplers
    if "typ_p" not in names:
        return sampling
    before = names[: names.index("typ_p")]
    is_cold = sampling.temperature == 0 and "temperature" in before
    if is_cold or ("top_n_sigma" in before and sampling.top_n_sigma > 0):
        return replace(sampling, typical_p=1.0)
    return sampling


def some_orders(count: int) -> Iterator[Sampling]:
    """All samplers on, in random orders."""
    chance = random.Random(7)
    most: dict[str, Any] = {}
    for name, fields in ACTIVE.items():
        if not name.startswith(("adaptive", "mirostat")):
            most |= fields
    for seed in range(count):
        names = [*ORDER, "adaptive_p"] if seed % 4 == 3 else [*ORDER]
        chance.shuffle(names)
        yield defined(
            Sampling(seed, samplers=tuple(names), min_keep=seed % 5, adaptive_target=0.2, **most)
        )


CHAINS = [pytest.param(Sampling(1, **fields), id=name) for name, fields in ACTIVE.items()]
CHAINS += [
    pytest.param(each, id=" ".join(each.samplers), marks=() if n < 4 else pytest.mark.long)
    for n, each in enumerate(some_orders(20))
]
"""Distributions of any order are compared with llama.cpp's below; here, draws with
distributions."""


def native_shares(sampling: Sampling, produced: Sequence[int], logits: Row, model: Model) -> Any:
    """Return the distributions with and without xtc, mixed by its probability."""
    mixed: dict[int, float] = defaultdict(float)
    p = sampling.xtc_probability
    for share, without in ((p, False), (1 - p, True)):
        if share:
            with native_chain(
                sampling, produced, len(logits), model.vocab, without_xtc=without, picks=True
            ) as chain:
                for token, each in applied(chain, logits)[0].items():
                    mixed[token] += share * each
    return mixed


N_DRAWS = 2000


@pytest.mark.parametrize("sampling", CHAINS)
def test_draws_have_the_distribution_of_llama_cpp(sampling: Sampling, model: Model) -> None:
    """By chi-square, over a request's draws."""
    logits = row(model.n_vocab, 3.0)
    before = logits.copy()
    expected = native_shares(sampling, PRODUCED, logits, model)
    chain = chain_of(sampling, PRODUCED, model.n_vocab, model)
    drawn = Counter(chain.draw(logits, dice(11, at), dice(12, at)) for at in range(N_DRAWS))
    assert (logits == before).all(), "a draw leaves no trace"
    assert drawn.keys() <= expected.keys()
    statistic, n_cells = chi_square(drawn, expected)
    print(f"chi-square {statistic:.1f} in {n_cells} cells")
    # Mean n - 1, deviation sqrt(2(n - 1)): six deviations occur once in many millions.
    assert statistic <= (n_cells - 1) + 6 * math.sqrt(2 * max(n_cells - 1, 1)) + 6


def chi_square(drawn: Counter[int], expected: dict[int, float]) -> tuple[float, int]:
    """Over the tokens with an expected count of five or more; the others are one cell."""
    cells: list[tuple[float, float]] = []
    rest_drawn = rest_expected = 0.0
    for token, share in expected.items():
        if share * N_DRAWS >= 5:
            cells.append((drawn[token], share * N_DRAWS))
        else:
            rest_drawn, rest_expected = rest_drawn + drawn[token], rest_expected + share * N_DRAWS
    if rest_expected >= 5:
        cells.append((rest_drawn, rest_expected))
    return sum((n - mean) ** 2 / mean for n, mean in cells), len(cells)


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    def maybe(off: float, low: float, high: float) -> float:
        # In coarse steps, because rounding decides at a cut's exact boundary.
        steps = st.integers(math.ceil(low * 128), math.floor(high * 128))
        return draw(st.just(off) | steps.map(lambda n: n / 128))

    names = draw(st.permutations(sorted(set(SAMPLERS) - {"infill"})))
    sampling = Sampling(
        seed=1,
        samplers=tuple(names[: draw(st.integers(0, len(names)))]),
        temperature=draw(st.just(0.0) | st.floats(0.2, 5)),
        top_k=draw(st.sampled_from([0, 1, 2, 40, 300, 10**6])),
        top_p=maybe(1, 0, 1),
        min_p=maybe(0, 0.001, 1),
        typical_p=maybe(1, 0.01, 1),
        top_n_sigma=maybe(-1, 0.1, 4),
        xtc_probability=draw(st.sampled_from([0.0, 1.0])),
        xtc_threshold=draw(st.floats(0.001, 0.6)),
        min_keep=draw(st.sampled_from([0, 1, 3, 50])),
        dynatemp_range=maybe(0, 0, 2),
        dynatemp_exponent=draw(st.floats(0.2, 3)),
        repetition_penalty=maybe(1, 0.5, 2),
        frequency_penalty=maybe(0, -2, 2),
        presence_penalty=maybe(0, -2, 2),
        repeat_last_n=draw(st.sampled_from([0, 1, 5, 64, 10_000])),
        dry_multiplier=maybe(0, 0.1, 3),
        dry_base=draw(st.floats(1, 4)),
        dry_allowed_length=draw(st.integers(0, 5)),
        dry_penalty_last_n=draw(st.sampled_from([0, 1, 10, 64, 10_000])),
        adaptive_target=maybe(-1, 0, 1),
        post_sampling_probs=True,
    )
    return defined(sampling)


@given(samplings(), st.integers(0, 10**6), st.lists(st.integers(0, 30), max_size=80))
@settings(max_examples=300, derandomize=True)
def test_any_chain_equals_llama_cpp_s(
    model: Model, sampling: Sampling, seed: int, produced: list[int]
) -> None:
    logits = row(model.n_vocab, 3.0, seed)
    with native_chain(sampling, produced, model.n_vocab, model.vocab, picks=True,
                      without_xtc=not sampling.xtc_probability) as chain:  # fmt: skip
        expected = applied(chain, logits)[0]
    note(str(to_builtins(sampling)))
    assert_alike(shares(chain_of(sampling, produced, model.n_vocab, model), logits), expected)


@given(
    st.sampled_from([1, 2, 5, 40, 300]),
    st.sampled_from([0.3, 0.9, 1.0]),
    st.floats(1, 8),
    st.sampled_from([-10.0, -3.0, 0.0, 3.0, 8.0]),
    st.integers(0, 10**6),
)
@settings(max_examples=200, derandomize=True)
def test_infill_equals_llama_cpp_s(
    model: Model, count: int, share: float, spread: float, end: float, seed: int
) -> None:
    """After the samplers that editor plug-ins send with it, with likely and unlikely ends."""
    order = ("top_k", "top_p", "infill")
    ends = tuple((token, end) for token in sorted(model.eog))
    sampling = Sampling(1, samplers=order, top_k=count, top_p=share, logit_bias=ends)
    sampling = replace(sampling, post_sampling_probs=True)
    logits = row(model.n_vocab, spread, seed)
    with native_chain(sampling, (), model.n_vocab, model.vocab) as chain:
        expected = applied(chain, logits)[0]
    assert_alike(shares(chain_of(sampling, (), model.n_vocab, model), logits), expected)


def test_xtc_leaves_a_token_that_may_be_drawn_whatever_its_threshold() -> None:
    """In llama.cpp, a forbidden one counts as the least likely of those above 0."""
    chain = Chain(Sampling(1, xtc_probability=1.0, xtc_threshold=0.0), {}, Undo(), 4)
    row = np.array([3, 2, -np.inf, 1], np.float32)
    assert [chain.draw(row, number, 0.0) for number in (0.0, 0.999)] == [3, 3]


@pytest.mark.parametrize("mu", [30.0, 1023.0, 1024.0, 1e9])
def test_mirostat_1_with_a_large_mu_excludes_no_token(mu: float) -> None:
    chain = Chain(Sampling(1, mirostat=1), {}, Undo(), 64)
    row = np.linspace(0, 3, 64, dtype=np.float32)
    drawn = set()
    for number in range(6000):
        chain.last.state = (mu,)
        drawn.add(chain.draw(row, (number + 0.5) / 6000))
    assert len(drawn) == 64


LEARNING = ("adaptive_p", "mirostat 1", "mirostat 2")


@pytest.mark.parametrize("name", LEARNING)
def test_the_state_of_a_chain_equals_llama_cpp_s(name: str, model: Model) -> None:
    """Both accept the tokens that llama.cpp draws, and have the same probabilities after each."""
    sampling = Sampling(3, post_sampling_probs=True, **ACTIVE[name])
    own = chain_of(sampling, (), model.n_vocab)
    flat: Any = library.load()
    with native_chain(sampling, (), model.n_vocab, model.vocab, picks=True) as native:
        for step in range(60):
            logits = row(model.n_vocab, 3.0, step)
            shares_there, chosen = applied(native, logits)
            assert_alike(shares(own, logits), shares_there)
            flat.llama_sampler_accept(native, chosen)
            # Draw until this token comes.
            assert any(own.draw(logits, dice(0, at)) == chosen for at in range(100_000))
            own.take()


@given(st.lists(st.sampled_from(["\n", ":", ' "', "e", "the cat", "*", "é", "ing th"]), max_size=4))
@settings(max_examples=40, deadline=None)
def test_dry_with_breakers_equals_llama_cpp_s(model: Model, breakers: list[str]) -> None:
    text = 'the cat: sat.\n"the cat" sat on the cat: sat.\n"the é" ca'
    tokens = model.tokenize(text, add_special=False, parse_special=False)
    logits = row(model.n_vocab, 3.0)
    for allowed in (0, 1, 2):
        for cut in range(len(tokens) - 12, len(tokens)):
            sampling = Sampling(
                1, samplers=("dry",), dry_multiplier=2.0, dry_allowed_length=allowed,
                dry_penalty_last_n=64, dry_sequence_breakers=tuple(breakers),
                post_sampling_probs=True,
            )  # fmt: skip
            with native_chain(sampling, tokens[:cut], model.n_vocab, model.vocab) as chain:
                expected = applied(chain, logits)[0]
            assert_alike(
                shares(chain_of(sampling, tokens[:cut], model.n_vocab, model), logits), expected
            )


@pytest.mark.parametrize("sampling", CHAINS)
def test_no_chain_draws_a_forbidden_token(sampling: Sampling, model: Model) -> None:
    logits = np.full(model.n_vocab, FORBIDDEN)
    allowed = {3: 1.0, 500: -20.0, 1000: 0.5}
    for token, logit in allowed.items():
        logits[token] = logit
    chain = chain_of(sampling, PRODUCED, model.n_vocab, model)
    assert {chain.draw(logits, at / 200, at / 200) for at in range(200)} <= allowed.keys()


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 3), max_size=60),
    st.sampled_from([-1, 0, 1, 5, 20, 64]),
    st.integers(0, 3),
    st.sampled_from([1.0, 1.75, 50.0]),
)
@settings(max_examples=200, deadline=None)
def test_a_repetition_is_found_whether_it_was_read_or_written(
    model: Model, prompt: list[int], written: list[int], last_n: int, allowed: int, base: float
) -> None:
    logits = row(model.n_vocab, 3.0)
    fields: dict[str, Any] = {
        "samplers": ("dry",), "dry_multiplier": 0.1, "dry_allowed_length": allowed,
        "dry_base": base, "post_sampling_probs": True,
    }  # fmt: skip
    sampling = Sampling(1, dry_penalty_last_n=last_n, **fields)
    natives = replace(sampling, dry_penalty_last_n=1000 if last_n < 0 else last_n)
    with native_chain(natives, prompt + written, model.n_vocab, model.vocab) as chain:
        expected = applied(chain, logits)[0]
    undo = Undo()
    dry = Dry(sampling, prompt, breakers_of(model, DEFAULT_BREAKERS), model.n_vocab, undo)
    for token in written:
        dry.remember(token)
    changes: dict[str, Any] = {"dry": dry} if last_n else {}
    assert_alike(shares(Chain(sampling, changes, undo, model.n_vocab), logits), expected)


def test_a_text_that_repeats_itself_takes_no_longer() -> None:
    """However long a repetition may be, because others wait for their turn in the intake."""
    sampling = Sampling(1, dry_multiplier=1.0, dry_allowed_length=10**9, dry_penalty_last_n=-1)
    began = time.thread_time()
    Dry(sampling, [5] * 20_000, {}, 1000, Undo())
    assert clock.within(time.thread_time() - began, 0.5)


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 3), max_size=40),
    st.dictionaries(
        st.integers(0, 3),
        st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=3),
    ),
    st.sampled_from([-1, 5, 20]),
)
@settings(max_examples=200, deadline=None)
def test_a_breaker_is_found_whether_it_was_read_or_written(
    prompt: list[int], produced: list[int], breakers: dict[int, list[tuple[int, ...]]], last_n: int
) -> None:
    sampling = Sampling(1, dry_multiplier=1.0, dry_allowed_length=1, dry_penalty_last_n=last_n)
    read = Dry(sampling, prompt + produced, breakers, 8, Undo())
    written = Dry(sampling, prompt, breakers, 8, Undo())
    for token in produced:
        written.remember(token)
    logits = np.zeros(8, np.float32)
    kept = [dry(Kept(logits.copy(), None, False, 8)).logits for dry in (read, written)]
    assert (kept[0] == kept[1]).all()


def test_breakers_that_begin_and_do_not_end_cost_nothing() -> None:
    sampling = Sampling(1, dry_multiplier=1.0, dry_penalty_last_n=-1)
    dry = Dry(sampling, [5] * 20_000, {5: [(6,)]}, 8, Undo())
    began = time.thread_time()
    for _ in range(10):
        dry.remember(5)
        dry(Kept(np.zeros(8, np.float32), None, False, 8))
    assert clock.within(time.thread_time() - began, 0.1)
