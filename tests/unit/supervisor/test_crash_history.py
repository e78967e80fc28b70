"""How crashes are counted, delayed and attributed to requests."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from worker.supervisor import recovery
from worker.supervisor.crash_history import (
    FIRST_DELAY_SECONDS,
    LONGEST_DELAY_SECONDS,
    SETTLED_SECONDS,
    Crash,
    CrashHistory,
)
from worker.supervisor.recovery import Quarantine, fingerprint
from worker.wire.sampling import Constraint, Sampling
from worker.wire.work import ChatPrompt, InferenceRequest, Medium

REQUEST = InferenceRequest("j", "a prompt", Sampling(seed=1), max_tokens=5)


def crash(at_seconds: float = 0.0, *, ready_seconds: float = 0.0, served: bool = False) -> Crash:
    return Crash("killed by SIGABRT", ready_seconds, served, at_seconds=at_seconds)


def test_a_loop_is_more_crashes_than_the_limit_within_the_window() -> None:
    history = CrashHistory(limit=2, window_seconds=10)
    for now in (0.0, 1.0):
        history.record(crash(now))
    assert not history.is_loop
    history.record(crash(10.5))
    assert history.recent == 2 and not history.is_loop, "the first has left the window"
    history.record(crash(10.6))
    assert history.is_loop


def test_delays_double_within_a_series_and_start_again_after_a_recovery() -> None:
    history = CrashHistory(limit=1000, window_seconds=10)
    delays = []
    for _ in range(12):
        history.record(crash())
        delays.append(history.delay_seconds)
    assert delays[:3] == [FIRST_DELAY_SECONDS * n for n in (1, 2, 4)]
    assert delays[-1] == LONGEST_DELAY_SECONDS
    history.record(crash(ready_seconds=SETTLED_SECONDS))
    assert history.delay_seconds == FIRST_DELAY_SECONDS
    history.record(crash())
    history.record(crash(served=True))
    assert history.delay_seconds == FIRST_DELAY_SECONDS


@given(st.lists(st.sampled_from(["crash", "well"]), max_size=30))
def test_quarantine_is_two_crashes_without_a_good_end_between(ends: list[str]) -> None:
    quarantine, crashes = Quarantine(300.0), 0
    for end in ends:
        if end == "crash":
            crashes += 1
            assert bool(quarantine.blame([REQUEST])) is (crashes >= 2)
        else:
            crashes = crashes if crashes >= 2 else 0
            quarantine.absolve(REQUEST)
        assert (REQUEST in quarantine) is (crashes >= 2)


def test_quarantine_ends_with_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    quarantine = Quarantine(300.0, clock=lambda: now)
    assert not quarantine.blame([REQUEST])
    now = 299.0
    assert quarantine.blame([REQUEST]) and REQUEST in quarantine
    now = 301.0
    assert REQUEST not in quarantine, "the first of the two crashes is forgotten"
    assert quarantine.blame([REQUEST]), "another one brings it back"
    now = 1000.0
    assert not quarantine.blame([REQUEST])
    now = 1300.0
    monkeypatch.setattr(recovery, "fingerprint", None)
    assert REQUEST not in quarantine, "none is taken for crashes that are forgotten"


def test_of_many_suspects_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_SUSPECTS_KEPT", 2)
    quarantine, many = Quarantine(300.0), [replace(REQUEST, prompt=str(n)) for n in range(3)]
    assert not any([quarantine.blame([each]) for each in many])
    assert [bool(quarantine.blame([each])) for each in (many[2], many[0])] == [True, False]


def test_the_fingerprint_sees_through_what_a_retry_changes() -> None:
    retry = replace(REQUEST, job_id="k", sampling=Sampling(seed=2), deadline=3.0, cache_salt="s")
    assert fingerprint(retry) == fingerprint(REQUEST)
    for other in (
        replace(REQUEST, prompt="another"),
        replace(REQUEST, max_tokens=6),
        replace(REQUEST, adapters=((0, 1.0),)),
        replace(REQUEST, prompt_logprobs=5),
        replace(REQUEST, sampling=Sampling(seed=1, constraint=Constraint("start: x", "grammar"))),
    ):
        assert fingerprint(other) != fingerprint(REQUEST)


def test_the_fingerprint_of_large_media_takes_no_time() -> None:
    """After a crash the event loop computes one for each request that arrives or ends."""

    def shown(data: bytes) -> InferenceRequest:
        return replace(REQUEST, prompt=ChatPrompt((), media=(Medium("image", data, "messages"),)))

    def seconds(request: InferenceRequest) -> float:
        began = time.thread_time()
        fingerprint(request)
        return time.thread_time() - began

    large, other = shown(bytes(1 << 24)), shown(bytes((1 << 24) - 1) + b"1")
    assert min(seconds(large) for _ in range(3)) < 0.01
    assert fingerprint(large) == fingerprint(shown(bytes(1 << 24))) != fingerprint(other)


@pytest.mark.parametrize("prompt", ["half a pair: \ud800", ("a", 1 << 70)])
def test_a_prompt_that_cannot_be_sent_has_a_fingerprint(prompt: Any) -> None:
    one, other = replace(REQUEST, prompt=prompt), replace(REQUEST, prompt=prompt, job_id="k")
    assert fingerprint(one) == fingerprint(other) != fingerprint(REQUEST)
