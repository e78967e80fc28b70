"""Log-probabilities of a prompt's own tokens, as evaluation harnesses ask for them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests import DATA
from tests.conftest import StartWorker
from tests.support.bundled import bundled_gguf
from tests.support.worker import WorkerProcess

PROMPT = "Once upon a time"


def completed(worker: WorkerProcess, **fields: Any) -> Any:
    return worker.answer("/v1/completions", {"prompt": PROMPT, "max_tokens": 0, **fields})


def test_loglikelihoods_are_those_of_transformers(start_worker: StartWorker) -> None:
    """Single precision on both sides; 50 texts, in one request and with an additional token."""
    exact = ("--kv-type", "f32", "--flash-attention", "off")
    worker = start_worker("--model", str(bundled_gguf("f32")), *exact)
    items = json.loads((DATA / "loglikelihoods.json").read_text("utf-8"))
    assert len(items) == 50
    ids = [item["ids"] for item in items]
    for max_tokens in (0, 1):
        answer = completed(worker, prompt=ids, max_tokens=max_tokens, echo=True, logprobs=1)
        for item, choice in zip(items, answer["choices"], strict=True):
            found, n = choice["logprobs"], len(item["ids"])
            assert len(found["tokens"]) == n + max_tokens
            behind = range(item["n_context"], n)
            total = sum(found["token_logprobs"][at] for at in behind)
            assert total == pytest.approx(item["loglikelihood"], abs=1e-3)
            best = [max(top, key=top.get) for top in found["top_logprobs"][1:]]
            greedy = all(best[at - 1] == found["tokens"][at] for at in behind)
            assert greedy == item["is_greedy"]


def test_an_echo_begins_with_the_prompt(worker: WorkerProcess) -> None:
    [choice] = completed(worker, echo=True, logprobs=2)["choices"]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    # The BOS before the prompt is one of its tokens, but not text.
    assert "".join(found["tokens"][1:]) == PROMPT
    assert found["text_offset"] == [0, 0, 4, 9, 11]
    assert all(len(top) == 2 for top in found["top_logprobs"][1:])


def test_a_prompt_of_tokens_is_echoed_as_text(worker: WorkerProcess) -> None:
    ids = worker.post("/tokenize", {"content": PROMPT}).json()["tokens"]
    [choice] = completed(worker, prompt=ids, echo=True)["choices"]
    assert choice["text"] == PROMPT and choice["logprobs"] is None


def test_a_text_has_the_same_log_probabilities_as_prompt_and_as_answer(
    worker: WorkerProcess,
) -> None:
    """An answer's own log-probabilities are those that it has as a prompt."""
    greedy = {"max_tokens": 12, "temperature": 0, "logprobs": 0}
    [drawn] = completed(worker, **greedy)["choices"]
    [both] = completed(worker, prompt=PROMPT + drawn["text"], echo=True, logprobs=0)["choices"]
    expected = drawn["logprobs"]["token_logprobs"]
    scores = both["logprobs"]["token_logprobs"][-len(expected) :]
    assert scores == pytest.approx(expected, abs=5e-2)


def test_a_cached_prompt_is_computed_for_its_scores(worker: WorkerProcess) -> None:
    long = {"prompt": "Once upon a time there was a fox. " * 20, "echo": True, "logprobs": 1}
    first, second = (completed(worker, **long)["choices"][0]["logprobs"] for _ in range(2))
    assert second["token_logprobs"][1:] == pytest.approx(first["token_logprobs"][1:], abs=5e-2)
    assert all(math.isfinite(p) and p <= 0 for p in first["token_logprobs"][1:])


def test_the_scores_of_a_long_prompt_are_all_there(worker: WorkerProcess) -> None:
    """They come from the engine in parts."""
    text = "Once upon a time there was a fox. " * 60
    [choice] = completed(worker, prompt=text, echo=True, logprobs=20)["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) * 21 > 4 * 2048, "that is five parts"
    assert "".join(found["tokens"][1:]) == choice["text"] == text
    assert None not in found["token_logprobs"][1:]


def test_a_hidden_token_takes_no_characters_of_the_offsets(worker: WorkerProcess) -> None:
    # After this prompt, the bundled model writes a turn marker in the middle.
    body = {"prompt": "1", "max_tokens": 12, "temperature": 0, "logprobs": 0}
    body |= {"deterministic": True}
    [choice] = worker.post("/v1/completions", body).json()["choices"]
    pieces, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    shown = [(at, piece) for at, piece in zip(offsets, pieces, strict=True) if "<|" not in piece]
    assert "<|im_start|>" in pieces[:-1]
    assert all(choice["text"].startswith(p, at) for at, p in shown)


def test_with_echo_the_end_of_generation_is_a_scored_token(worker: WorkerProcess) -> None:
    """Harnesses request one token and cut it off, so there must be one."""
    end = "<|im_end|>"
    [end_id] = worker.post("/tokenize", {"content": end}).json()["tokens"]
    fields = {"max_tokens": 1, "echo": True, "logprobs": 0, "logit_bias": {str(end_id): 100}}
    [choice] = completed(worker, **fields)["choices"]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"][-1] == end


def test_prompt_logprobs_in_the_form_of_vllm(worker: WorkerProcess) -> None:
    [choice] = completed(worker, prompt_logprobs=2, max_tokens=1)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == 4
    assert choice["logprobs"] is None and not choice["text"].startswith(PROMPT)
    for entry in rest:
        assert 2 <= len(entry) <= 3
        assert {1, 2} <= {each["rank"] for each in entry.values()}
    assert [e["decoded_token"] for e in rest[1].values() if e["rank"] == 1] == [" upon"]


def test_a_step_scores_more_rows_than_a_micro_batch_has(
    worker: WorkerProcess, start_worker: StartWorker
) -> None:
    """The micro-batch has fewer rows than there are slots."""
    sizes = ("--slots", "8", "--micro-batch", "4", "--prefill-budget", "512")
    small = start_worker(*sizes, "--context-length", "256")
    found = [
        completed(each, prompt=PROMPT * 20, echo=True, logprobs=0)["choices"][0]["logprobs"]
        for each in (worker, small)
    ]
    (_, *scores), (_, *expected) = (each["token_logprobs"] for each in found)
    assert len(scores) > 64
    assert scores == pytest.approx(expected, abs=0.1)
