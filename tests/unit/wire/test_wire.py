"""The pipe's frames: complete and in order, however the kernel cuts them; and the handling of
frames that the other end must not send."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.supervised import CONFIG, request, script, supervised
from worker.errors import InvalidRequest, ModelError, WorkerError
from worker.wire import transport
from worker.wire.adapters import Adapter
from worker.wire.async_channel import AsyncChannel
from worker.wire.codec import MALFORMED
from worker.wire.messages import (
    Accepted,
    Answered,
    Cancel,
    Command,
    DraftFile,
    EngineFailed,
    Event,
    Failed,
    Finished,
    Preparing,
    Progress,
    PromptProgress,
    PromptScored,
    RequestEvent,
    Started,
    Stats,
    Stop,
    Submit,
    Threads,
    Token,
    TokenLogprob,
)
from worker.wire.sampling import Constraint, Sampling
from worker.wire.transport import COMMANDS as COMMAND_DECODER
from worker.wire.transport import EVENTS, LENGTH, SyncChannel, encode
from worker.wire.work import (
    ApplyTemplate,
    ChatPrompt,
    Detokenize,
    Embed,
    InferenceRequest,
    InfillPrompt,
    ProveResidency,
    Rank,
    Tokenize,
    Tokenized,
)

__all__ = ["script"]

TOP = TokenLogprob(7, b"\xff", -0.5), TokenLogprob(8, b" a", float("-inf"))
SCORED = TokenLogprob(7, b"\xff", -0.5, TOP)
CHAT = ChatPrompt(({"role": "user", "content": ["é", 1, None, 2.5, {"a": True}]},))
SAMPLING = Sampling(2**64 - 1, logit_bias=((1, -2.0),), constraint=Constraint("start: x", "f"))
COMMANDS: list[Command] = [
    msgspec.structs.replace(CONFIG, adapters=(Adapter("a", "/a"),), draft=DraftFile("/d", "d")),
    Submit(1, InferenceRequest("j", "text", SAMPLING, 5, stop=("a",), produced=(1, 2))),
    Submit(2, InferenceRequest("k", (1, 2, 3), Sampling(1), 5, deadline=1.5)),
    Submit(3, InferenceRequest("l", CHAT, Sampling(1), 5)),
    Submit(4, InferenceRequest("m", InfillPrompt("a", "b", (("n", "t"),)), Sampling(1), 5)),
    Submit(5, Tokenize("text", with_pieces=True)),
    Submit(6, Detokenize((1, 2))),
    Submit(7, ApplyTemplate(CHAT)),
    Submit(8, Embed(("text", (1, 2)))),
    Submit(9, Rank("query", ("a", "b"))),
    Submit(10, ProveResidency()),
    Cancel(7),
    Stop(),
]
FRAMES: list[list[Event]] = [
    [Progress("load", 50.0, None), EngineFailed(ModelError("Gone.", path="/a", parts=[1, 2]))],
    [Preparing(1), Accepted(1, 5, b"\1\0\0\0"), Started(1, 2, "<think>")],
    [PromptProgress(1, 5, 0.5), Threads(1, "1: the least of 1 CPU allowed")],
    [Token(n, "a story\u2028\U0001f994", (3, 4), (SCORED,)) for n in range(4)],
    [PromptScored(1, (SCORED, SCORED)), Stats(4, 5, 6, 7, 8.0, 9.0, 1.0)],
    [Finished(1, "STOP_SEQUENCE", 5, 1.0, "a", 2.0, (SCORED,))],
    [Answered(1, "text"), Answered(2, Tokenized(b"\1\0\0\0")), Answered(3, [(3, b"\0")])],
    [Token(2, "x" * 100_000, ())],
    [Answered(4, None), Failed(3, InvalidRequest("No.", errors=[{"field": "a"}]))],
    [],
]


def same(one: object, other: object) -> bool:
    """Check for equality; errors do not define their own."""
    return repr(one) == repr(other) and details(one) == details(other)


def details(frame: object) -> list[object]:
    events = frame if isinstance(frame, list) else []
    return [each.error.details for each in events if isinstance(each, Failed | EngineFailed)]


def test_an_integer_that_the_other_end_would_not_take_is_not_sent() -> None:
    wide = 2**64
    schema = ChatPrompt(({"role": "user", "content": wide},))
    request = InferenceRequest("j", schema, Sampling(1), 5)
    assert received(encode(Submit(1, request))[LENGTH.size :]) == Submit(1, request)
    for wrong in (
        InferenceRequest("j", (wide,), Sampling(1), 5),
        InferenceRequest("j", "text", Sampling(1, logit_bias=((wide, 1.0),)), 5),
        InferenceRequest("j", "text", Sampling(1, top_k=-wide), 5),
    ):
        with pytest.raises(ValueError, match="wide integer"):
            encode(Submit(1, wrong))


class Pipe:
    """The API process's end, with a transport that only records that it is closed."""

    def __init__(self) -> None:
        self.frames: list[list[Event]] = []
        self.is_closed = False
        self.channel = AsyncChannel(self.frames.append, lambda: None)
        transport: Any = self
        self.channel.connection_made(transport)

    def abort(self) -> None:
        self.is_closed = True


def received(body: bytes) -> Command | None:
    """Return the command that the engine process's end reads from a frame."""
    parent, other_end = socket.socketpair()
    with parent:
        child = SyncChannel(other_end)
        try:
            parent.sendall(LENGTH.pack(len(body)) + body)
            return child.recv()
        finally:
            child.close()


def test_every_message_crosses_whole() -> None:
    kinds = {type(event) for frame in FRAMES for event in frame}
    assert {kind.__name__ for kind in get_args(Event)} == {k.__name__ for k in kinds} | {"Ready"}
    pipe = Pipe()
    for frame in FRAMES:
        pipe.channel.data_received(encode(frame))
        assert same(pipe.frames[-1], frame)
    for command in COMMANDS:
        assert received(encode(command)[LENGTH.size :]) == command


def test_log_probabilities_are_not_tracked_by_the_garbage_collector() -> None:
    """Otherwise it would traverse a million of them and block all requests."""
    pipe = Pipe()
    pipe.channel.data_received(encode([Token(1, "a", (7,), (SCORED,))]))
    ((token,),) = pipe.frames
    assert isinstance(token, Token)
    assert not any(map(gc.is_tracked, (*token.logprobs, *token.logprobs[0].top)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5000), max_size=60))
def test_frames_survive_any_cut(lengths: list[int]) -> None:
    pipe = Pipe()
    stream = b"".join(map(encode, FRAMES))
    for length in lengths:
        pipe.channel.data_received(stream[:length])
        stream = stream[length:]
    pipe.channel.data_received(stream)
    assert repr(pipe.frames) == repr(FRAMES)


def test_both_ends_talk_and_notice_the_end() -> None:
    async def test() -> None:
        parent, other_end = socket.socketpair()
        frames: list[list[Event]] = []
        lost = asyncio.Event()
        channel = await AsyncChannel.open(parent, frames.append, lost.set)
        child = SyncChannel(other_end)
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
    parent, other_end = socket.socketpair()
    parent.sendall(sent)
    parent.close()
    child = SyncChannel(other_end)
    assert child.recv() is None
    with pytest.raises(ConnectionError):
        for _ in range(100):
            child.send([Token(1, "x" * 10_000, ())])
    child.close()


def test_a_frame_over_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(ValueError, match="over the limit"):
        encode([Token(1, "x" * 2000, ())])


def test_an_engine_that_cannot_send_exits_at_once() -> None:
    """Otherwise it would compute silently until the stall timeout."""
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


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.integers(2**64 - 2, 2**80) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_value_in_a_chat_crosses_whole(content: object) -> None:
    command = Submit(1, ApplyTemplate(ChatPrompt(({"role": "tool", "content": content},))))
    assert COMMAND_DECODER.decode(encode(command)[LENGTH.size :]) == command
    pipe = Pipe()
    pipe.channel.data_received(encode([Failed(1, InvalidRequest("No.", value=content))]))
    [[event]] = pipe.frames
    assert isinstance(event, Failed) and event.error.details == {"value": content}


@pytest.mark.parametrize("kind", WorkerError.__subclasses__())
def test_every_error_crosses_whole(kind: type[WorkerError]) -> None:
    pipe = Pipe()
    pipe.channel.data_received(encode([Failed(1, kind("No.", a=1, b=["x"]))]))
    [[event]] = pipe.frames
    assert isinstance(event, Failed) and event.error.code == kind.code
    assert (event.error.message, event.error.details) == ("No.", {"a": 1, "b": ["x"]})


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize(
    "body",
    [
        pickle.dumps([Bomb()]),
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x91\xd4\x02a",
        *map(
            msgspec.msgpack.encode,
            [
                [["Other", 1]],
                [["Cancel", 1]],
                [["Token", 1, "a", [1], [], "more"]],
                [["Token", 1, "a"]],
                [["Token", "1", "a", [1]]],
                [["Finished", 1, "OTHER", 1, 1.0]],
                [["Started", 1, -1]],
                [["Failed", 1, ["OTHER", "No.", {}]]],
                [["Failed", 1, ["CANCELLED", "No."]]],
                [["Answered", 1, {"type": "Other"}]],
                {"type": "Token"},
                [msgspec.msgpack.Ext(77, b"12")],
            ],
        ),
    ],
)
def test_a_malformed_frame_ends_the_engine(
    body: bytes, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pipe = Pipe()
    pipe.channel.data_received(LENGTH.pack(len(body)) + body + encode([]))
    assert pipe.is_closed and pipe.frames == []
    assert pipe.channel.fault is not None and "malformed frame" in pipe.channel.fault
    pipe.channel.data_received(b"and more")
    with pytest.raises(MALFORMED):
        received(body)
    assert list(tmp_path.iterdir()) == []


# --- random frames -----------------------------------------------------------------------


def mutants(originals: list[bytes], n: int, seed: int) -> Iterator[bytes]:
    """Generate random frames: bytes changed, cut, inserted and mixed; parts of messages replaced by
    parts of others; and noise."""
    draw = random.Random(seed)
    parts = [part for body in originals for part in _parts(msgspec.msgpack.decode(body))]
    for _ in range(n):
        body = bytearray(draw.choice(originals))
        match draw.randrange(5):
            case 0:
                for _ in range(draw.randint(1, 4)):
                    body[draw.randrange(len(body))] = draw.randrange(256)
            case 1:
                del body[draw.randrange(len(body)) :]
            case 2:
                other = draw.choice(originals)
                at, start = draw.randrange(len(body)), draw.randrange(len(other))
                body[at : at + draw.randrange(9)] = other[start : start + draw.randrange(40)]
            case 3:
                tree = _replaced(msgspec.msgpack.decode(body), draw, parts)
                body = bytearray(msgspec.msgpack.encode(tree))
            case _:
                body = bytearray(draw.randbytes(draw.randrange(60)))
        yield bytes(body)


def _parts(tree: Any) -> Iterator[Any]:
    yield tree
    if isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _parts(part)


def _replaced(tree: Any, draw: random.Random, parts: list[Any]) -> Any:
    if isinstance(tree, list) and tree and draw.random() < 0.8:
        at = draw.randrange(len(tree))
        return [*tree[:at], _replaced(tree[at], draw, parts), *tree[at + 1 :]]
    if isinstance(tree, dict) and tree and draw.random() < 0.8:
        key = draw.choice(list(tree))
        return tree | {key: _replaced(tree[key], draw, parts)}
    return draw.choice(parts)


@pytest.mark.parametrize(
    ("n", "seed"),
    [(2_000, 1), pytest.param(100_000, random.randrange(1 << 30), marks=pytest.mark.long)],
    ids=["2000", "100000"],
)
def test_random_frames_are_messages_or_clean_errors(n: int, seed: int) -> None:
    n_whole = 0
    for body in mutants([encode(frame)[LENGTH.size :] for frame in FRAMES], n, seed):
        pipe = Pipe()
        pipe.channel.data_received(LENGTH.pack(len(body)) + body)
        assert bool(pipe.frames) != pipe.is_closed
        assert all(isinstance(event, get_args(Event)) for frame in pipe.frames for event in frame)
        n_whole += len(pipe.frames)
    assert 0 < n_whole < n
    n_whole = 0
    for body in mutants([encode(command)[LENGTH.size :] for command in COMMANDS], n, seed):
        try:
            assert isinstance(received(body), Command)
            n_whole += 1
        except MALFORMED:
            pass
    assert 0 < n_whole < n


def test_an_absurd_length_closes_the_channel() -> None:
    pipe = Pipe()
    pipe.channel.data_received(b"\xff\xff\xff\xff" + encode([]))
    assert pipe.is_closed and pipe.frames == []


def test_random_messages_raise_nothing_in_the_supervisor(script: Callable[..., None]) -> None:
    """Complete but invalid messages: out of order, duplicated, or of other requests."""
    originals = [encode(frame)[LENGTH.size :] for frame in FRAMES]
    draw = random.Random(3)

    async def test() -> None:
        async with supervised() as supervisor:
            jobs = [supervisor.open(request("ignore", f"{n}"), None) for n in range(4)]
            for number, body in enumerate(mutants(originals, 2_000, seed=2)):
                try:
                    frame = EVENTS.decode(body)
                except MALFORMED:
                    continue
                for event in frame:
                    if isinstance(event, RequestEvent):
                        job = draw.choice(jobs)
                        event = msgspec.structs.replace(event, request_id=job.request_id)
                    supervisor.on_events([event])
                for at, job in enumerate(jobs):
                    if job.has_ended:
                        jobs[at] = supervisor.open(request("ignore", f"{number}-{at}"), None)
            assert supervisor.state == "ready" and len(jobs) == 4

    asyncio.run(test())
