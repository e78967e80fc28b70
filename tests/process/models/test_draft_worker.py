"""`--draft` and `--speculate mtp` on the real process: planned, resident, named, with the same
text; unsuitable models are refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import StartWorker
from tests.support.commands import diagnose, plan_refused
from tests.support.random_models import random_model
from tests.support.worker import WorkerProcess, run_to_exit, shown
from tests.unit.models.native_loads import damaged
from worker.wire.black_box import DRAFT, MODEL, BlackBox

PROMPT = "1, 2, 3, 4, 5, 6, 7, 8. 1, 2, 3, 4, 5, 6, 7, 8. 1, 2, 3,"


def test_a_draft_model_is_planned_resident_and_guesses(
    start_worker: StartWorker, warm_cache: Path
) -> None:
    plain = start_worker("--no-mmap")
    text = plain.execute(PROMPT, max_tokens=48, temperature=0.0).text
    alone = plain.get("/info").json()
    assert plain.stop() == 0
    assert alone["engine"]["speculation"] == {"kind": "off", "reason": "", "draft": None}
    draft = ("--draft", str(random_model("dense")), "--no-mmap", "--speculate", "auto")
    worker = start_worker(*draft)
    assert worker.execute(PROMPT, max_tokens=48, temperature=0.0).text == text
    info = worker.get("/info").json()
    assert worker.stop() == 0
    speculation = info["engine"]["speculation"]
    assert speculation["kind"] == "draft" and speculation["draft"]["layers_on_device"] == 5
    assert speculation["draft"]["model_ref"] == str(random_model("dense"))
    needed = info["engine"]["plan"]["draft"]
    taken = info["residency"]["device_bytes"] - alone["residency"]["device_bytes"]
    assert taken == pytest.approx(needed, rel=0.01)
    dense = str(random_model("dense"))
    report = diagnose(warm_cache, draft=dense, mmap=False, speculate="auto")
    assert report.plan is not None and report.plan.parts["draft"] == needed
    assert ("draft", "ok") in [(check.name, check.status) for check in report.checks]


def pulses(worker: WorkerProcess) -> tuple[int, ...]:
    """Return the engine's count of pulses in its black box."""
    opened = Path(f"/proc/{worker.engine_pid}/fd").iterdir()
    box = next(each for each in opened if "llorch-black-box" in os.readlink(each))
    file = os.open(box, os.O_RDWR)
    try:
        return BlackBox(file).pulses
    finally:
        os.close(file)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count")
def test_the_same_model_guesses_right(start_worker: StartWorker) -> None:
    worker = start_worker("--draft", "tiny-model", "--speculate", "draft")
    before = pulses(worker)
    for _ in range(3):
        worker.execute(PROMPT, max_tokens=200, ignore_eos=True, temperature=0.0)
    after = pulses(worker)
    for part in (MODEL, DRAFT):
        assert before[part] != after[part], "both are seen to move, whenever one looks"
    drafted = worker.metric("worker_engine_tokens_drafted")
    # A draft as large as its model is not worth many guesses, but nearly all are right.
    assert drafted > 0
    assert worker.metric("worker_engine_tokens_accepted") >= 0.9 * drafted
    assert worker.stop() == 0


def test_the_models_own_layers_are_planned_resident_and_guess(
    start_worker: StartWorker, warm_cache: Path
) -> None:
    model = ("--model", str(random_model("predicting")), "--no-mmap")
    plain = start_worker(*model, "--speculate", "off")
    text = plain.execute(PROMPT, max_tokens=48, ignore_eos=True, temperature=0.0).text
    alone = plain.get("/info").json()
    assert plain.stop() == 0
    worker = start_worker(*model, "--speculate", "mtp")
    for _ in range(3):
        answer = worker.execute(PROMPT, max_tokens=48, ignore_eos=True, temperature=0.0)
        assert answer.text == text
    info = worker.get("/info").json()
    assert info["model"]["conversion"] is None, "a file of others has no manifest"
    assert worker.metric("worker_engine_tokens_accepted") > 0
    assert worker.stop() == 0
    assert info["engine"]["speculation"] == {"kind": "mtp", "reason": "", "draft": None}
    parts, before = info["engine"]["plan"], alone["engine"]["plan"]
    planned = shown("plan", warm_cache, *model, "--speculate", "mtp")["parts"]
    assert {planned[part] - parts[part] for part in ("weights", "compute", "draft")} == {0}
    # The memory for hidden states is allocated with the first batches.
    more = parts["draft"] + parts["weights"] - before["weights"]
    taken = info["residency"]["device_bytes"] - alone["residency"]["device_bytes"]
    assert 0.5 * more < taken < more


def test_a_recurrent_model_is_served_without_guesses_and_says_why(
    start_worker: StartWorker,
) -> None:
    model = ("--model", str(random_model("hybrid")), "--draft", str(random_model("dense")))
    worker = start_worker(*model, "--speculate", "auto")
    engine = worker.get("/info").json()["engine"]
    assert engine["speculation"]["kind"] == "off" and "draft" not in engine["plan"]
    (line,) = worker.logs("engine.speculation_off")
    assert line["reason"] == engine["speculation"]["reason"]
    assert "recurrent" in line["reason"]
    assert worker.stop() == 0


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (("--draft", "hybrid"), 3, "cannot guess: its memory is recurrent or windowed"),
        (("--speculate", "mtp"), 2, "has no layers for multi-token prediction"),
    ],
)
def test_a_model_that_cannot_guess_is_refused(
    warm_cache: Path, flags: tuple[str, str], code: int, words: str
) -> None:
    arguments = [str(random_model("hybrid")) if each == "hybrid" else each for each in flags]
    ended = run_to_exit("--port", "0", *arguments, cache_dir=warm_cache)
    assert ended.code == code, ended.sentence
    assert words in ended.sentence
    assert "Traceback" not in ended.stderr


def test_a_damaged_draft_model_is_named_where_native_code_dies_of_it(
    warm_cache: Path, tmp_path: Path
) -> None:
    key = "gpt-oss.attention.value_length"
    draft = damaged(random_model("experts"), tmp_path / "draft.gguf", key, 3)
    ended = run_to_exit("--port", "0", "--draft", str(draft), cache_dir=warm_cache)
    assert ended.code == 3 and f"the draft model '{draft}'" in ended.sentence, ended.stderr
    planned = plan_refused(warm_cache, draft=str(draft))
    assert planned.exit_code == 3 and f"the draft model '{draft}'" in planned.message
