"""Damage of every kind to a real GGUF's header: a clear error or a success, never anything else.

Each damaged file is read in this process, so any other effect (another exception, a loop, a memory
blow-up) fails the test itself.
"""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.samples import write_gguf, write_split
from worker.errors import ModelError
from worker.models.gguf import layout
from worker.models.gguf.header import GgufHeader, read_header
from worker.models.gguf.servable import check_servable

FOUND_NO_FAULT = "no fault"


def outcome(path: Path) -> str:
    """Return the message of the only allowed error, or `FOUND_NO_FAULT`."""
    try:
        header = read_header(path)
        check_servable(header)
        for array in header.arrays.values():
            array.read()
        assert isinstance(header, GgufHeader)
        return FOUND_NO_FAULT
    except ModelError as error:
        assert "\n" not in error.message
        return error.message


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """Return a small file, and the start of its data section."""
    path = write_gguf(tmp_path_factory.mktemp("sample") / "m.gguf", vocab=["a", "bc", "def"])
    return path.read_bytes(), read_header(path).tensors[0].offset


def test_every_header_byte_flipped(tmp_path: Path, sample: tuple[bytes, int]) -> None:
    whole, data_start = sample
    path = tmp_path / "m.gguf"
    faults = 0
    started = time.process_time()
    for index in range(data_start):
        for value in (whole[index] ^ 0xFF, whole[index] ^ 0x01):
            path.write_bytes(whole[:index] + bytes([value]) + whole[index + 1 :])
            faults += outcome(path) != FOUND_NO_FAULT
    # Most bytes of a header are text, where changes are harmless, unlike in lengths and types.
    assert faults > data_start / 4
    assert time.process_time() - started < 120


def test_truncation_at_every_boundary(tmp_path: Path, sample: tuple[bytes, int]) -> None:
    whole, data_start = sample
    path = tmp_path / "m.gguf"
    cuts = [*range(data_start), *range(data_start, len(whole), 251), len(whole) - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        assert outcome(path) != FOUND_NO_FAULT, f"cut at {cut} of {len(whole)} was not noticed"
    path.write_bytes(whole)
    assert outcome(path) == FOUND_NO_FAULT


def test_every_64_bit_field_made_huge(tmp_path: Path, sample: tuple[bytes, int]) -> None:
    """Whatever eight bytes mean (a count, a length, an offset), a huge value costs no memory."""
    whole, data_start = sample
    path = tmp_path / "m.gguf"
    tracemalloc.start()
    try:
        for index in range(4, data_start - 8, 5):
            for huge in (2**63 - 1, 2**64 - 1, 2**31):
                raw = struct.pack("<Q", huge)
                path.write_bytes(whole[:index] + raw + whole[index + 8 :])
                outcome(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * 2**20, f"{peak} bytes for a file of {len(whole)}"


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    n_tensors=st.integers(0, 2**64 - 1),
    n_keys=st.integers(0, 2**64 - 1),
    rest=st.binary(max_size=400),
)
def test_random_bytes_after_the_magic_are_refused(
    tmp_path: Path, n_tensors: int, n_keys: int, rest: bytes
) -> None:
    path = tmp_path / "m.gguf"
    for tensors, keys in ((n_tensors, n_keys), (n_tensors % 4, n_keys % 4)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest)
        assert outcome(path) != FOUND_NO_FAULT


class CutMeanwhile(io.FileIO):
    """A file that is truncated to `left_bytes` just before its n-th block is read."""

    def __init__(self, path: Path, n_reads: int, left_bytes: int) -> None:
        super().__init__(path)
        self.path, self.n_reads, self.left_bytes = path, n_reads, left_bytes

    def readinto(self, buffer: Any) -> int:
        self.n_reads -= 1
        if self.n_reads == 0:
            os.truncate(self.path, self.left_bytes)
        return super().readinto(buffer) or 0


@settings(max_examples=150, deadline=None)
@given(n_reads=st.integers(1, 12), left=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_while_it_is_read(
    tmp_path_factory: pytest.TempPathFactory, n_reads: int, left: float
) -> None:
    """Each block of 128 bytes may be the first missing one."""
    path = write_gguf(tmp_path_factory.mktemp("cut") / "m.gguf", vocab=["a", "bc"], tensors=False)
    left_bytes = int(path.stat().st_size * left)

    def opened(path: Path, *_: object, **__: object) -> io.BufferedReader:
        return io.BufferedReader(CutMeanwhile(path, n_reads, left_bytes), 128)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layout, "open", opened, raising=False)
        assert outcome(path)


def test_a_truncated_file_does_not_end_the_process(tmp_path: Path) -> None:
    """A mapped file would, by SIGBUS."""
    path = write_gguf(tmp_path / "m.gguf", vocab=[f"token {n}" for n in range(200_000)])
    script = (
        "import os, sys; from worker.models.gguf.header import read_header\n"
        "strings = read_header(sys.argv[1]).arrays['tokenizer.ggml.tokens'].read_bytes()\n"
        "next(strings); os.truncate(sys.argv[1], 4096)\n"
        "print(len(list(strings)))"
    )
    child = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    assert child.returncode == 1 and "became shorter while it was read" in child.stderr


@pytest.mark.parametrize("n_strings", [2**24, 2**27])
def test_a_sparse_file_is_refused_quickly(tmp_path: Path, n_strings: int) -> None:
    """Empty strings of eight zero bytes cost an attacker nothing, so their number is limited."""
    name = b"x"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    head += struct.pack("<Q", len(name)) + name + struct.pack("<IIQ", 9, 8, n_strings)
    path = tmp_path / "m.gguf"
    path.write_bytes(head)
    with path.open("r+b") as file:
        file.truncate(len(head) + 8 * n_strings)
    started = time.process_time()
    assert "strings" in outcome(path)
    assert time.process_time() - started < 5


def test_a_missing_or_damaged_part_of_a_split_model(tmp_path: Path) -> None:
    first, second = write_split(tmp_path)
    whole = second.read_bytes()
    for index in range(0, len(whole) - 512, 2):
        second.write_bytes(whole[:index] + bytes([whole[index] ^ 0xFF]) + whole[index + 1 :])
        assert outcome(first)
    second.write_bytes(whole)
    assert outcome(first) == FOUND_NO_FAULT
