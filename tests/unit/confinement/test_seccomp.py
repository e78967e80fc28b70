"""The filter of system calls, run as the kernel runs it."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.confinement.seccomp import DECIDED, MACHINES, REFUSED, filter_program

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
PID = 4711
THREAD = 0x10000


def answer(machine: str, call: int, *arguments: int, audit: int | None = None) -> int:
    """Return the filter's result for a call."""
    arch = MACHINES[machine].audit if audit is None else audit
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", call, arch, 0, *padded)
    program = filter_program(machine, PID)
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator = at = 0
    while True:
        instruction, if_true, if_false, value = code[at]
        at += 1
        match instruction:
            case 0x20:
                accumulator = int(struct.unpack_from("<I", data, value)[0])
            case 0x06:
                return int(value)
            case _:
                tests = {0x15: accumulator == value, 0x35: accumulator >= value}
                at += if_true if tests.get(instruction, accumulator & value) else if_false


def numbers(machine: str, table: Any) -> Iterator[tuple[str, int]]:
    column = list(MACHINES).index(machine)
    return ((name, each[column]) for name, each in table.items() if each[column] is not None)


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_systems_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("needs the headers of Linux (Debian: linux-libc-dev)")
    text = HEADERS[machine].read_text()
    known = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)
    declared = {name: int(number) for name, number in known}
    for name, number in [*numbers(machine, REFUSED), *numbers(machine, DECIDED)]:
        assert declared[name] == number, name


@pytest.mark.parametrize("machine", MACHINES)
@given(call=st.integers(0, 700), arguments=st.tuples(*[st.integers(0, 2**64 - 1)] * 3))
def test_only_what_is_listed_is_refused(
    machine: str, call: int, arguments: tuple[int, ...]
) -> None:
    refused = set(dict(numbers(machine, REFUSED)).values())
    decided = set(dict(numbers(machine, DECIDED)).values())
    found = answer(machine, call, *arguments)
    if call not in decided:
        assert found == (EPERM if call in refused else ALLOW)
    assert answer(machine, call, *arguments, audit=0x40000003) == KILL
    assert answer(machine, call | 0x40000000, *arguments) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
@given(word=st.integers(0, 2**32 - 1), high=st.integers(0, 2**32 - 1))
def test_arguments_decide(machine: str, word: int, high: int) -> None:
    call = dict(numbers(machine, DECIDED))
    value = high << 32 | word
    assert answer(machine, call["clone3"], value) == ENOSYS
    assert answer(machine, call["clone"], value | THREAD) == ALLOW
    assert answer(machine, call["clone"], value & ~THREAD) == EPERM
    for name in ("kill", "tgkill", "prlimit64"):
        is_own = word == PID or (name == "prlimit64" and word == 0)
        assert answer(machine, call[name], value) == (ALLOW if is_own else EPERM)
        assert answer(machine, call[name], PID) == ALLOW
    types = word in (0x5412, 0x541C)
    assert answer(machine, call["ioctl"], 0, value) == (EPERM if types else ALLOW)
    assert answer(machine, call["ioctl"], 0, 0x5412) == EPERM
