"""The pipe's frames: whole, in order, however the kernel cuts them."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.errors import ContextLengthExceeded
from worker.wire import transport
from worker.wire.async_channel import AsyncChannel
from worker.wire.messages import Accepted, Cancel, Event, Failed, Stop, Token
from worker.wire.transport import SyncChannel, encode

FRAMES: list[list[Event]] = [
    [Accepted(1, 5)],
    [],
    [Token(1, "a story\u2028\U0001f994", (3, 4)), Token(2, "x" * 100_000, ())],
    [Failed(3, ContextLengthExceeded("Too long.", prompt_tokens=9, context_length=8))],
]


def collecting() -> tuple[AsyncChannel, list[list[Event]], list[bool]]:
    frames: list[list[Event]] = []
    lost: list[bool] = []
    return AsyncChannel(frames.append, lambda: lost.append(True)), frames, lost


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5000), max_size=60))
def test_frames_survive_any_cut(lengths: list[int]) -> None:
    channel, frames, _ = collecting()
    stream = b"".join(encode(frame) for frame in FRAMES)
    for length in lengths:
        channel.data_received(stream[:length])
        stream = stream[length:]
    channel.data_received(stream)
    assert repr(frames) == repr(FRAMES)
    error = frames[3][0]
    assert isinstance(error, Failed)
    assert error.error.details == {"prompt_tokens": 9, "context_length": 8}


def test_both_ends_talk_and_notice_the_end() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        frames: list[list[Event]] = []
        lost = asyncio.Event()
        channel = await AsyncChannel.open(ours, frames.append, lost.set)
        child = SyncChannel(theirs)
        channel.send(Cancel(7))
        channel.send(Stop())
        assert await asyncio.to_thread(child.recv) == Cancel(7)
        assert await asyncio.to_thread(child.recv) == Stop()

        def send_all() -> None:
            for frame in FRAMES:
                child.send(frame)

        senders = [threading.Thread(target=send_all) for _ in range(4)]
        for sender in senders:
            sender.start()
        while len(frames) < 4 * len(FRAMES):
            await asyncio.sleep(0.01)
        for sender in senders:
            sender.join()
        assert sorted(map(repr, frames)) == sorted(map(repr, FRAMES * 4))
        child.close()
        await lost.wait()
        channel.send(Stop())  # to nobody, without an error

    asyncio.run(asyncio.wait_for(test(), 30))


@pytest.mark.parametrize("sent", [b"", b"\0\0", encode(Stop())[:-1]])
def test_a_parent_that_dies_in_mid_frame_is_the_end(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(sent)
    ours.close()
    child = SyncChannel(theirs)
    assert child.recv() is None
    with pytest.raises(ConnectionError):
        for _ in range(100):
            child.send([Token(1, "x" * 10_000, ())])
    child.close()


def test_an_absurd_length_closes_the_channel() -> None:
    channel, frames, _ = collecting()

    class Transport:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    pipe: Any = Transport()
    channel.connection_made(pipe)
    channel.data_received(b"\xff\xff\xff\xff" + encode([]))
    assert pipe.aborted and frames == []


def test_a_frame_over_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(ValueError, match="over the limit"):
        encode([Token(1, "x" * 2000, ())])


def test_an_engine_that_cannot_send_leaves_at_once() -> None:
    """It would otherwise compute on in silence until the stall timeout."""
    code = (
        "import socket\n"
        "from worker.engine.outbox import Outbox\n"
        "from worker.wire.transport import SyncChannel\n"
        "ours, theirs = socket.socketpair()\n"
        "outbox = Outbox(SyncChannel(ours))\n"
        "outbox.put([object()])\n"
        "outbox.flush()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 70 and b"outbox_failed" in done.stderr + done.stdout
