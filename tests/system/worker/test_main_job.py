"""The main job on the real model: a prompt goes in over HTTP, the reference's tokens come out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import DATA
from tests.conftest import StartWorker
from tests.support.worker import WorkerProcess

CASES = json.loads((DATA / "expected_greedy.json").read_text())["cases"]
CLEAR_MARGIN = 0.05
"""Difference of the two best logits below which rounding may choose the other token."""


def case_name(case: dict[str, Any]) -> str:
    return str(case.get("prompt") or case["messages"][-1]["content"])[:40]


@pytest.fixture(scope="module")
def exact(share_worker: StartWorker) -> WorkerProcess:
    """A worker with unquantised weights, like the reference."""
    return share_worker("--outtype", "bf16")


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_greedy_text_is_the_reference(exact: WorkerProcess, case: dict[str, Any]) -> None:
    prompt = case.get("prompt") or case["rendered"]
    stream = exact.execute(prompt, temperature=0, max_tokens=len(case["token_ids"]) + 1)
    prompt_ids = exact.post("/tokenize", {"content": prompt, "add_special": True}).json()["tokens"]
    assert prompt_ids == case["prompt_token_ids"]
    assert stream.events[0]["prompt_tokens"] == len(prompt_ids)
    if case["smallest_margin"] > CLEAR_MARGIN:
        assert stream.ids == case["token_ids"]
        assert stream.text == case["text"]
        assert stream.end["stop_reason"] == case["stop_reason"]
    else:
        assert stream.ids[:2] == case["token_ids"][:2], "a near-tie does not change the beginning"
    assert stream.end["tokens_out"] == len(stream.ids)
    if "messages" in case:
        rendered = exact.post("/apply-template", {"messages": case["messages"]}).json()
        assert rendered["prompt"] == prompt


def test_each_stop_reason_is_reached(worker: WorkerProcess) -> None:
    (case,) = (case for case in CASES if "Count to 9" in json.dumps(case.get("messages", "")))
    count = case["rendered"]
    assert worker.execute(count, temperature=0).end["stop_reason"] == "EOS"

    cut = worker.execute(count, temperature=0, max_tokens=5)
    assert cut.end["stop_reason"] == "MAX_TOKENS"
    assert cut.end["tokens_out"] == len(cut.ids) == 5

    stopped = worker.execute(count, temperature=0, stop=["7", "5, 6"])
    assert stopped.end["stop_reason"] == "STOP_SEQUENCE"
    assert stopped.end["stop_sequence_matched"] == "5, 6"
    assert stopped.text == "1, 2, 3, 4, "


def test_the_seed_decides_the_text_and_is_echoed(worker: WorkerProcess) -> None:
    def story(**fields: Any) -> tuple[str, int]:
        stream = worker.execute("Once upon a time", temperature=1, max_tokens=60, **fields)
        assert stream.events[0]["seed"] == stream.end["seed"]
        return stream.text, stream.end["seed"]

    first, seed = story(seed=7, deterministic=True)
    assert seed == 7
    assert story(seed=7, deterministic=True) == (first, 7)
    assert len({story(seed=number)[0] for number in range(6)}) > 3
    drawn = {story()[1] for _ in range(3)}
    assert len(drawn) == 3, "a seed is drawn for each request that names none"
    assert story(seed=0)[1] == 0
