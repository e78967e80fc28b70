"""The engine on llama.cpp and the bundled model: what the byte model cannot tell."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.support.bundled import bundled_gguf
from tests.support.real_engine import RealEngine
from worker.errors import InferenceFailed, InvalidRequest
from worker.wire.messages import Failed, Finished
from worker.wire.sampling import Sampling

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
STORY = "Once upon a time, there was a clever fox named Otto. Otto loved to dance. One day, Otto"
LONG = (
    STORY
    + " went to the park with a shiny stone. The morning was cold. Soon Otto wanted the shiny stone"
)
CAPITAL = CHAT.format("What is the capital of France?")


@pytest.fixture(scope="module")
def engine() -> Iterator[RealEngine]:
    engine = RealEngine()
    yield engine
    engine.close()


def test_the_bundled_model_knows_its_answers(engine: RealEngine) -> None:
    assert engine.generate(CAPITAL) == "The capital of France is Paris."
    assert engine.generate(CHAT.format("Show me the emoji for a fox.")).endswith("🦊")


@pytest.mark.parametrize("kv_unified", [False, True])
def test_streams_together_say_what_each_says_alone(kv_unified: bool) -> None:
    engine = RealEngine(slots=4, kv_unified=kv_unified)
    countries = ["France", "Italy", "Peru", "Japan", "Kenya", "Cuba", "Egypt", "Spain"]
    prompts = [CHAT.format(f"What is the capital of {country}?") for country in countries]
    alone = [engine.generate(prompt) for prompt in prompts]
    together = [engine.submit(prompt) for prompt in prompts]
    engine.run()
    assert [engine.text(request_id) for request_id in together] == alone
    assert len(set(alone)) == len(countries)
    engine.close()


@pytest.mark.parametrize("kv_unified", [False, True])
def test_reused_cells_do_not_change_the_answer(kv_unified: bool) -> None:
    fresh = RealEngine(prefix_cache=False, kv_unified=kv_unified)
    reusing = RealEngine(prefix_cache=True, kv_unified=kv_unified)
    questions = ["What is the capital of Peru?", "What is 3 plus 4?", "Count to 5."]
    start = LONG + "\n"
    for question in questions:
        expected = fresh.generate(start + CHAT.format(question))
        request_id = reusing.submit(start + CHAT.format(question))
        reusing.run()
        assert reusing.text(request_id) == expected
    assert reusing.cached_tokens(request_id) >= 32
    # And at once, while the first of them still computes the common beginning.
    together = [reusing.submit("The end. " + start + CHAT.format(q)) for q in questions]
    reusing.run()
    for request_id, question in zip(together, questions, strict=True):
        assert reusing.text(request_id) == fresh.generate(
            "The end. " + start + CHAT.format(question)
        )
    fresh.close()
    reusing.close()


def test_a_prompt_in_small_pieces_gives_the_same_answer() -> None:
    engine = RealEngine(prefill_budget=3, prefix_cache=False)
    running = engine.submit(CHAT.format("Count to 12."), max_tokens=60)
    engine.turn()
    joined = engine.submit(LONG + "\n" + CAPITAL)
    engine.run()
    assert engine.text(running) == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."
    assert engine.text(joined) == "The capital of France is Paris."
    engine.close()


def test_deterministic_requests_repeat_bit_by_bit_among_other_streams(engine: RealEngine) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 7, "logprobs": 0}
    texts, logprobs = set(), set()
    for batch in range(5):
        own = [
            engine.submit(STORY, max_tokens=24, deterministic=True, **options) for _ in range(10)
        ]
        engine.submit(STORY + " went", max_tokens=12, temperature=1.0, seed=batch)
        engine.run()
        texts |= {engine.text(request_id) for request_id in own}
        logprobs |= {tuple(p.logprob for p in engine.logprobs(r)) for r in own}
    assert len(texts) == 1
    assert len(logprobs) == 1


def test_seeds(engine: RealEngine) -> None:
    def story(seed: int) -> str:
        return engine.generate(STORY, max_tokens=40, temperature=1.0, seed=seed)

    assert story(5) == story(5)
    assert len({story(seed) for seed in range(6)}) > 3
    # Also beyond the 32 bits of llama.cpp's own seeds.
    assert story(5) != story(5 + (1 << 32))


def test_top_k_of_one_is_greedy(engine: RealEngine) -> None:
    greedy = engine.generate(CAPITAL)
    assert engine.generate(CAPITAL, temperature=2.0, top_k=1, seed=3) == greedy
    assert engine.generate(CAPITAL, temperature=2.0, top_p=0.0, seed=3) == greedy
    assert engine.generate(CAPITAL, temperature=2.0, min_p=1.0, seed=3) == greedy


def test_logit_bias_bans_and_forces(engine: RealEngine) -> None:
    (paris,) = engine.prompts.tokenize(" P", add_special=False)
    request_id = engine.submit(CAPITAL, logit_bias=((paris, -100.0),))
    engine.run()
    assert paris not in engine.ids(request_id)
    forced = engine.submit(CAPITAL, logit_bias=((paris, 100.0),), max_tokens=3)
    engine.run()
    assert engine.ids(forced) == [paris] * 3


def test_penalties(engine: RealEngine) -> None:
    (a,) = engine.prompts.tokenize(" P", add_special=False)
    bias = ((a, 30.0),)
    plain = engine.submit(CAPITAL, logit_bias=bias, max_tokens=12)
    present = engine.submit(CAPITAL, logit_bias=bias, max_tokens=12, presence_penalty=2.0)
    frequent = engine.submit(CAPITAL, logit_bias=bias, max_tokens=40, frequency_penalty=2.0)
    engine.run()
    assert engine.ids(plain) == [a] * 12
    assert engine.ids(present) == [a] * 12, "presence counts once, however often"
    assert engine.ids(frequent)[:6] == [a] * 6 and engine.ids(frequent).count(a) < 40
    # Repetition counts the prompt too: where it is rewarded, nothing new is said.
    rewarded = engine.submit(CAPITAL, repetition_penalty=0.0, max_tokens=8)
    engine.run()
    assert set(engine.ids(rewarded)) <= set(engine.prompts.build(CAPITAL))
    assert engine.text(rewarded) != engine.generate(CAPITAL, max_tokens=8)


def test_ignore_eos_goes_on_to_max_tokens(engine: RealEngine) -> None:
    request_id = engine.submit(CAPITAL, ignore_eos=True, max_tokens=50)
    engine.run()
    assert engine.end(request_id).stop_reason == "MAX_TOKENS"
    assert engine.end(request_id).tokens_out == 50


def test_every_stop_reason(engine: RealEngine) -> None:
    eos = engine.submit(CAPITAL)
    most = engine.submit(CAPITAL, max_tokens=3)
    stopped = engine.submit(CAPITAL, stop=("is Par",))
    engine.run()
    assert [engine.end(r).stop_reason for r in (eos, most, stopped)] == [
        "EOS",
        "MAX_TOKENS",
        "STOP_SEQUENCE",
    ]
    assert engine.text(stopped) == "The capital of France "
    assert engine.end(stopped).stop_sequence == "is Par"


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("logit_bias", {"logit_bias": ((999_999, 1.0),)}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    engine: RealEngine, field: str, sampling: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(CAPITAL, **sampling)
    assert caught.value.details["field"] == field


def test_logprobs_are_those_of_the_logits(engine: RealEngine) -> None:
    request_id = engine.submit(CAPITAL, logprobs=3, max_tokens=6)
    engine.run()
    reported = engine.logprobs(request_id)
    assert [p.token_id for p in reported] == engine.ids(request_id)
    for entry in reported:
        assert len(entry.top) == 3
        assert entry.top[0][0] == entry.token_id, "greedy takes the best"
        assert entry.top[0][2] == pytest.approx(entry.logprob)
        assert all(-60 < p <= 0 for _, _, p in entry.top)
    everything = engine.submit(CAPITAL, logprobs=engine.model.n_vocab, max_tokens=1)
    engine.run()
    (first,) = engine.logprobs(everything)
    assert np.exp([p for _, _, p in first.top]).sum() == pytest.approx(1.0, abs=1e-6)


def test_cells_are_empty_again_without_reuse() -> None:
    engine = RealEngine(prefix_cache=False)
    ids = [engine.submit(STORY, max_tokens=8, cache_salt=str(i)) for i in range(8)]
    engine.run()
    assert all(isinstance(engine.end(r), Finished) for r in ids)
    assert [engine.context.last_position(slot) for slot in range(4)] == [-1] * 4
    engine.close()


def test_a_cancelled_prompt_is_abandoned_within_its_batch() -> None:
    engine = RealEngine()
    request_id = engine.submit(LONG * 8, max_tokens=4)
    engine.loop.call(engine.backend.abort)
    engine.turn()  # the abort lands in this decode: nothing of it counts
    assert engine.context.last_position(0) == -1
    engine.loop.cancel(request_id)
    engine.run()
    again = engine.submit(CAPITAL)
    engine.run()
    assert engine.text(again) == "The capital of France is Paris."
    engine.close()


def test_special_tokens_in_a_prompt_are_recognised_and_bos_is_there_once(
    engine: RealEngine,
) -> None:
    plain = engine.prompts.build("Hello")
    assert plain[0] == engine.model.bos
    assert engine.prompts.build("<|endoftext|>Hello") == plain
    assert engine.prompts.build(tuple(plain)) == plain
    assert len(engine.prompts.tokenize("<|im_start|>", add_special=False)) == 1


def test_a_sampling_default_needs_a_seed_only() -> None:
    assert Sampling(seed=0).temperature == 1.0


def test_control_tokens_are_shown_where_they_are_asked_for(engine: RealEngine) -> None:
    start = engine.model.tokenize("<|im_start|>", add_special=False, parse_special=True)
    assert len(start) == 1 and engine.backend.piece(start[0]) == b""
    assert engine.backend.piece(start[0], ("<|im_start|>",)) == b"<|im_start|>"
    assert engine.prompts.detokenize((*start, *start)) == "<|im_start|>" * 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_no_numbers_fail_the_request_by_name(
    tmp_path: Path, temperature: float
) -> None:
    broken = tmp_path / "broken.gguf"
    shutil.copy(bundled_gguf("f32"), broken)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(broken, "r+").tensors}
    tensors["output_norm.weight"].data[0] = np.nan
    engine = RealEngine(path=broken)
    request_id = engine.submit("Once upon a time", temperature=temperature)
    engine.run()
    (*_, last) = engine.events[request_id]
    assert isinstance(last, Failed) and isinstance(last.error, InferenceFailed)
    assert "NaN: its weights" in last.error.message
    engine.close()
