"""Bytes past the page cache are the bytes that were meant, wherever they begin and end."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.convert.direct import BLOCK_BYTES, DirectFile

SIZE = 6 * BLOCK_BYTES + 100


@settings(deadline=None)
@given(
    cuts=st.lists(st.integers(0, SIZE), max_size=6),
    at=st.integers(0, SIZE),
    count=st.integers(0, SIZE),
    is_direct=st.booleans(),
)
def test_what_is_written_in_pieces_is_read_as_one(
    cuts: list[int], at: int, count: int, is_direct: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("direct") / "file"
    path.write_bytes(bytes(SIZE))
    data = np.random.default_rng(len(cuts)).integers(0, 256, SIZE, dtype=np.uint8)
    out = DirectFile(path, os.O_WRONLY, is_direct=is_direct)
    edges = sorted({0, SIZE, *cuts})
    for begin, end in zip(edges, edges[1:], strict=False):
        out.write(data[begin:end], begin)
    out.close()
    assert path.read_bytes() == data.tobytes()
    back = DirectFile(path, os.O_RDONLY, is_direct=is_direct)
    assert np.array_equal(back.read(count, at), data[at : at + count])
    back.close()


def test_a_file_system_without_direct_transfers_is_used_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    (tmp_path / "file").touch()
    file = DirectFile(tmp_path / "file", os.O_RDWR)
    data = np.arange(9000, dtype=np.uint16).view(np.uint8)
    file.write(data, 0)
    assert np.array_equal(file.read(data.size, 0), data)
    file.close()
