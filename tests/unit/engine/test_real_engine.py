"""The engine on llama.cpp and the bundled model: what the byte model cannot show."""

from __future__ import annotations

from codecs import getincrementaldecoder
from typing import Any

import numpy as np
import pytest

from tests.support.real_engine import RealEngine

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
STORY = "Once upon a time, there was a clever fox named Otto. Otto loved to dance. One day, Otto"
LONG = (
    STORY
    + " went to the park with a shiny stone. The morning was cold. Soon Otto wanted the shiny stone"
)
CAPITAL = CHAT.format("What is the capital of France?")


def test_a_prompt_in_small_pieces_gives_the_same_answer() -> None:
    engine = RealEngine(prefill_budget=3, prefix_cache=False)
    running = engine.submit(CHAT.format("Count to 12."), max_tokens=60)
    engine.turn()
    joined = engine.submit(LONG + "\n" + CAPITAL)
    engine.run()
    assert engine.text(running) == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."
    assert engine.text(joined) == "The capital of France is Paris."


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


@pytest.mark.parametrize("n_tokens", [100, 230, 300])
def test_a_deterministic_prompt_is_computed_in_the_same_parts_beside_others(n_tokens: int) -> None:
    """llama.cpp's rounding depends on the rows of a batch."""
    prompt = tuple(300 + 7 * at % 600 for at in range(n_tokens))
    logprobs = []
    for n_beside in (0, 2):
        engine = RealEngine(4, inter_token_seconds=1e-9)
        for number in range(n_beside):
            engine.submit((900 + number, 3, 4), max_tokens=200, ignore_eos=True)
        engine.turn()
        options: dict[str, Any] = {"deterministic": True, "logprobs": 0, "ignore_eos": True}
        request = engine.submit(prompt, max_tokens=6, **options)
        engine.run()
        logprobs.append([each.logprob for each in engine.logprobs(request)])
    assert logprobs[0] == logprobs[1]


def test_a_long_state_in_memory_is_given_up_for_a_short_computation() -> None:
    engine = RealEngine(4, n_cells=768, kv_unified=True, flash_attention="off")
    long = tuple(300 + 7 * at % 600 for at in range(440))
    for prompt in (long, (9, 8, 7) * 120):  # the second sends the first to memory
        engine.submit(prompt, max_tokens=8, ignore_eos=True)
        engine.run()
    stream = engine.submit((900, 901, 902) * 10 + (5,) * 360, max_tokens=100, ignore_eos=True)
    while len(engine.ids(stream)) < 3:
        engine.turn()
    begun = engine.submit(long[:300] + (11, 12, 13), max_tokens=4, ignore_eos=True)
    small = engine.submit((3, 4, 5), max_tokens=4, ignore_eos=True)
    while len(engine.ids(small)) < 4:
        engine.turn()
    assert engine.events[begun] and len(engine.ids(stream)) < 50, "nobody waits for the stream"
    engine.run()


def test_logprobs_are_those_of_the_logits(engine: RealEngine) -> None:
    request_id = engine.submit(CAPITAL, logprobs=3, max_tokens=6)
    engine.run()
    reported = engine.logprobs(request_id)
    assert [p.token_id for p in reported] == engine.ids(request_id)
    for entry in reported:
        assert len(entry.top) == 3
        assert entry.top[0].token_id == entry.token_id, "greedy takes the best"
        assert entry.top[0].logprob == pytest.approx(entry.logprob)
        assert all(-60 < each.logprob <= 0 for each in entry.top)
    everything = engine.submit(CAPITAL, logprobs=engine.model.n_vocab, max_tokens=1)
    engine.run()
    (first,) = engine.logprobs(everything)
    assert np.exp([each.logprob for each in first.top]).sum() == pytest.approx(1.0, abs=1e-6)


def test_a_token_begins_after_the_text_of_those_before_it(engine: RealEngine) -> None:
    """Some are parts of a character, and some are omitted from the text."""
    pieces = engine.runner.piece
    some = [t for t in range(engine.model.n_vocab) if len(pieces(t)) < 2 or pieces(t)[-1] > 127]
    wish: dict[str, Any] = {
        "logit_bias": tuple((token, 50.0) for token in some),
        "temperature": 2.0,
    }
    request_id = engine.submit(
        CAPITAL, logprobs=0, max_tokens=200, ignore_eos=True, stop=("\x00!",), **wish
    )
    engine.run()
    characters = getincrementaldecoder("utf-8")("replace")
    begin = 0
    for entry in engine.logprobs(request_id):
        assert entry.begin == begin
        begin += len(characters.decode(pieces(entry.token_id)))
    assert begin + len(characters.decode(b"", final=True)) == len(engine.text(request_id))


def test_a_cancelled_prompt_is_abandoned_within_its_batch() -> None:
    engine = RealEngine()
    request_id = engine.submit(LONG * 8, max_tokens=4)
    engine.loop.call(engine.runner.abort)
    engine.turn()  # the abort happens in this decode, so none of it counts
    assert engine.context.last_position(0) == -1
    engine.loop.cancel(request_id)
    engine.run()
    again = engine.submit(CAPITAL)
    engine.run()
    assert engine.text(again) == "The capital of France is Paris."


def test_special_tokens_in_a_prompt_are_recognised_and_bos_is_there_once(
    engine: RealEngine,
) -> None:
    plain = engine.prompts.build("Hello")
    assert plain[0] == engine.model.bos
    assert engine.prompts.build("<|endoftext|>Hello") == plain
    assert engine.prompts.build(tuple(plain)) == plain
    assert len(engine.prompts.tokenize("<|im_start|>", add_special=False)) == 1


def test_control_tokens_are_shown_on_request(engine: RealEngine) -> None:
    start = engine.tokens_of("<|im_start|>")
    assert len(start) == 1 and engine.runner.piece(start[0]) == b""
    assert engine.runner.piece(start[0], ("<|im_start|>",)) == b"<|im_start|>"
    assert engine.prompts.detokenize((*start, *start)) == "<|im_start|>" * 2
