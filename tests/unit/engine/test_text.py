"""Detokenising and stop matching: no byte is lost or added, wherever the cuts are."""

from __future__ import annotations

from encodings.utf_8 import IncrementalDecoder
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.sequence import Sequence
from worker.engine.text.stops import StopMatcher, _State
from worker.errors import InvalidRequest
from worker.wire.sampling import Sampling
from worker.wire.work import InferenceRequest


def detokenizer() -> IncrementalDecoder:
    """Make a detokenizer like each sequence's."""
    request = InferenceRequest("job", "", Sampling(0), 1)
    return Sequence(1, request, [], cast(Any, None)).characters


def stream(pieces: list[bytes]) -> list[str]:
    characters = detokenizer()
    return [*map(characters.decode, pieces), characters.decode(b"", final=True)]


@given(st.lists(st.binary(max_size=6), max_size=12))
def test_bytes_in_pieces_decode_like_the_whole(pieces: list[bytes]) -> None:
    assert "".join(stream(pieces)) == b"".join(pieces).decode("utf-8", "replace")


def test_an_emoji_comes_whole() -> None:
    assert stream([bytes([byte]) for byte in "🦊!".encode()]) == ["", "", "", "🦊", "!", ""]


def test_a_cut_off_emoji_is_held_until_the_end() -> None:
    characters = detokenizer()
    assert (characters.decode(b"a\xf0\x9f"), bool(characters.buffer)) == ("a", True)
    assert (characters.decode(b"", final=True), bool(characters.buffer)) == ("\ufffd", False)


def run_stops(text: str, stops: list[str], cuts: list[int]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    sent = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        emitted, stop = matcher.feed(text[start:end])
        sent += emitted
        if stop is not None:
            return sent, stop
    return sent + matcher.finish(), None


def test_only_what_may_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["###", "stop"])
    assert matcher.feed("a#b##") == ("a#b", None)
    assert matcher.feed("x st") == ("##x ", None)
    assert matcher.feed("op")[1] == "stop"


def steps_of(matcher: StopMatcher, text: str) -> int:
    """Count the states that an automaton enters, as a measure of its work."""
    n_steps = 0
    after = _State.after

    def counted(state: _State, character: str) -> _State:
        nonlocal n_steps
        n_steps += 1
        return after(state, character)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_State, "after", counted)
        for character in text:
            matcher.feed(character)
    return n_steps


def test_the_work_of_a_character_does_not_grow_with_the_stops() -> None:
    few, many = ["aab"], ["a" * 60 + chr(0x4E00 + n) for n in range(128)]
    text = "a" * 5000
    assert steps_of(StopMatcher(few), text) == steps_of(StopMatcher(many), text) == len(text)


def test_stops_of_more_characters_than_an_automaton_has_are_refused_by_name() -> None:
    StopMatcher(["a" * 64] * 128)
    with pytest.raises(InvalidRequest, match="at most 8192 characters; they have 8193") as refusal:
        StopMatcher(["a" * 64] * 128 + ["b"])
    assert refusal.value.details["field"] == "stop"


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Find, by definition, the stop with the first end; of those that end there, the longest."""
    for end in range(len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            longest = max(here, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.text("ab\n", max_size=40),
    st.lists(st.text("ab\n", min_size=1, max_size=6), min_size=1, max_size=6),
    st.data(),
)
def test_a_stop_is_found_by_its_definition_wherever_the_text_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    assert run_stops(text, stops, cuts) == naive(text, stops)
