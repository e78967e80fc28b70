"""A job across engines: who is blamed for a crash, and what the next engine gets."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from tests.support.supervised import request
from worker.observability.metrics import Metrics
from worker.supervisor.job import Job, Stage
from worker.supervisor.recovery import Quarantine, after_a_crash
from worker.wire.messages import Accepted, Finished, PromptProgress, Started, Token
from worker.wire.work import InferenceRequest, LineLimits


def accepted(work: InferenceRequest | None = None, metrics: Metrics | None = None) -> Job:
    """A job that its engine has accepted."""
    job = Job(1, work or request("say x"), metrics or Metrics("w"), lambda job, error: None)
    job.accept(Accepted(1, 9))
    return job


@pytest.mark.parametrize(("in_hand", "n_blamed"), [({99}, 0), (set(), 1), ({1}, 1)])
def test_the_request_in_the_black_box_is_blamed_or_the_only_one_if_it_is_empty(
    in_hand: set[int], n_blamed: int
) -> None:
    job = Job(1, request("say x"), Metrics("w"), lambda job, error: None)
    job.enter(Stage.SENT)
    quarantine = Quarantine(60.0)
    for _ in range(2):
        job.enter(Stage.SENT)
        after_a_crash([job], frozenset(in_hand), 5, quarantine)
    assert job.crashes_spent == 2 * n_blamed
    assert (job.work in quarantine) == bool(n_blamed)


def test_the_progress_of_a_prompt_only_grows_across_engines() -> None:
    job = accepted()
    job.feed([Started(1, 2), PromptProgress(1, 6, 0.1)])
    after_a_crash([job], frozenset({1}), 5, Quarantine(60.0))
    progress = [PromptProgress(1, n, 0.1) for n in (4, 6, 8)]
    assert job.continued([Started(1, 0), *progress]) == progress[-1:]


def test_the_next_engine_gets_tokens_length_of_text_and_state_of_the_sampler() -> None:
    job = accepted()
    tokens = [Token(1, "ab"[n], (5 + n,), learned=(0.5 + n,)) for n in (0, 1)]
    job.feed([Started(1, 0), *tokens])
    after_a_crash([job], frozenset({1}), 5, Quarantine(60.0))
    work = job.submission()
    assert isinstance(work, InferenceRequest)
    assert (work.produced, work.sent_chars, work.learned) == ((5, 6), 2, (1.5,))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_time_of_an_answer_goes_to_the_next_engine(deterministic: bool) -> None:
    """A limit by time began again in each engine."""
    lines = LineLimits(after_ms=50)
    work = replace(request("say x"), lines=lines, deterministic=deterministic)
    job = accepted(work)
    again = job.submission()
    assert isinstance(again, InferenceRequest) and again.lines == work.lines
    before = time.monotonic()
    job.feed([Started(1, 0), Token(1, "a", (5,))])
    after_a_crash([job], frozenset({1}), 5, Quarantine(60.0))
    again = job.submission()
    assert isinstance(again, InferenceRequest) and again.lines.began is not None
    assert again.lines.after_ms == 50 and before <= again.lines.began <= time.monotonic()


def test_the_wait_in_the_queue_ends_when_the_engine_starts_not_when_its_event_arrives() -> None:
    """Otherwise a whole prompt counts as waiting if the engine leaves this process no core."""
    metrics = Metrics("w")
    job = accepted(metrics=metrics)
    began = time.monotonic()
    time.sleep(0.1)
    job.feed([Started(1, 0, at=began), Token(1, "a", (5,))])
    assert metrics.value("worker_queue_wait_seconds_sum") < 0.1
    assert metrics.value("worker_time_to_first_token_seconds_sum") >= 0.1


@pytest.mark.parametrize("has_begun", [True, False])
def test_the_times_of_a_continued_answer_are_within_its_age(has_begun: bool) -> None:
    job = accepted()
    job.feed([Started(1, 0), *[Token(1, "a", (5,))] * has_begun])
    after_a_crash([job], frozenset({1}), 5, Quarantine(60.0))
    of_the_next = Finished(1, "EOS", 2, 30.0, prompt_time_ms=4000.0)
    finished = job.continued([Started(1, 0), Token(1, "b", (6,)), of_the_next])[-1]
    assert isinstance(finished, Finished)
    is_within = finished.prompt_time_ms + finished.decode_time_ms <= 1000 * job.age_seconds
    assert is_within if has_begun else finished == of_the_next
