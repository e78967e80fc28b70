"""Pictures in a sequence: ids that name them, positions, and where a sequence may be cut."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.media.decoder import Sound
from worker.engine.media.embeddings import Embeddings
from worker.engine.media.reader import MediaReader
from worker.engine.media.span import PromptTokens, Span, ids_of, key_of, position_of
from worker.llama.media import MediaChunk, Piece
from worker.wire.work import Medium


@dataclass
class Chunk:
    n_tokens: int
    n_positions: int
    at_once: bool = False


@given(
    medium=st.binary(min_size=1, max_size=64),
    part=st.integers(0, 99),
    n_tokens=st.integers(1, 300),
    data=st.data(),
)
def test_ids_name_a_part_and_encode_its_positions(
    medium: bytes, part: int, n_tokens: int, data: Any
) -> None:
    chunk = cast(Any, Chunk(n_tokens, data.draw(st.integers(1, n_tokens))))
    name = hashlib.sha256(medium).digest()
    key = key_of(name, part)
    ids = ids_of(key, chunk)
    assert len(ids) == n_tokens and all(-(1 << 31) <= each < 0 for each in ids)
    assert ids == ids_of(key, chunk)
    assert ids != ids_of(key_of(name, part + 1), chunk)
    assert ids != ids_of(key_of(hashlib.sha256(medium + b"x").digest(), part), chunk)
    tokens = [1, 2, *ids, 3]
    span = Span(2, chunk, key)
    assert position_of(tokens, 2) == 2
    assert position_of(tokens, span.end) == 2 + chunk.n_positions == span.end - span.n_still
    assert position_of(tokens, len(tokens)) == 3 + chunk.n_positions


class FakeMedia:
    """A projector and a decoder that split any sound into these pieces."""

    sample_rate = 16_000

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces, self.decoded = pieces, list[bytes]()
        self.reader = MediaReader(cast(Any, self), cast(Any, self), 8, 100)

    def decode(self, medium: Medium, sample_rate: int, most_seconds: float) -> Sound:
        self.decoded.append(medium.data)
        return Sound(b"")

    def sound(self, samples: Any) -> list[Piece]:
        return self.pieces


def test_a_medium_of_many_parts_is_hashed_once() -> None:
    """A long sound has sixty parts, and its file may be large."""
    hears, encoded = FakeMedia([MediaChunk(1, False, 1, None) for _ in range(60)]), bytes(1 << 24)
    began = time.thread_time()
    hashlib.sha256(encoded).digest()
    named = time.thread_time()
    hears.reader.read(Medium("audio", encoded, "x"), prompt := PromptTokens(), 100)
    assert len(prompt.ids) == 60 == len({span.key for span in prompt.spans})
    assert time.thread_time() - named < 5 * (named - began)


def test_a_medium_that_a_request_holds_is_not_decoded_again() -> None:
    """For example for the choices of a prompt; under another salt it is, because cache hits would
    leak."""
    hears = FakeMedia([(1, 2), MediaChunk(3, False, 3, None), (4,), MediaChunk(2, False, 2, None)])
    decoded = hears.decoded

    def read(data: bytes = b"a", salt: str | None = None, counted: bool = False) -> PromptTokens:
        prompt = PromptTokens(counted, cache_salt=salt)
        hears.reader.read(Medium("audio", data, "x"), prompt, 100)
        return prompt

    first, second = read(), read()
    assert decoded == [b"a"] and first.ids == second.ids
    assert [s.chunk for s in first.spans] == [s.chunk for s in second.spans]
    assert read(counted=True).ids == first.ids and decoded == [b"a"]
    read(b"b")
    read(salt="other")
    assert decoded == [b"a", b"b", b"a"]
    del first
    read()
    assert len(decoded) == 3, "the second holds it"
    del second
    read(counted=True)
    read()
    assert len(decoded) == 5


def test_the_least_recently_used_embeddings_are_evicted() -> None:
    kept, rows = Embeddings(250), np.zeros((1, 25), np.float32)
    for name in (b"a", b"b"):
        kept.put((None, name), rows)
    assert kept.get((None, b"a")) is not None and kept.get(("salt", b"a")) is None
    kept.put((None, b"c"), rows)
    assert kept.get((None, b"b")) is None and kept.get((None, b"a")) is not None
    assert kept.n_bytes == 200
    large = np.zeros((1, 100), np.float32)
    kept.put((None, b"large"), large)
    assert kept.get((None, b"large")) is large, "the newest is kept, for the batch that needs it"
