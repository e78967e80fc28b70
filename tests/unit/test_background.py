"""Waiting requests take precedence over a thread that reads or encodes megabytes."""

import os
import sys
import threading

import pytest

from worker.background import background_thread


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities only on Linux")
def test_a_background_thread_has_a_lower_priority_than_its_maker() -> None:
    before = niceness()
    with background_thread("quiet") as thread:
        assert thread.submit(niceness).result() == min(before + 10, 19)
    assert niceness() == before
