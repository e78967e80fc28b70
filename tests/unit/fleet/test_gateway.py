"""The gateway in front of scripted workers: forwarding, retries and refusals."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import structlog

from tests.support.clock import HoldClock, within
from tests.support.supervised import until
from tests.unit.fleet.scripted import (
    SSE_HEAD,
    Conversation,
    Got,
    Script,
    at,
    call,
    fleet_of,
    tells,
)
from worker.api.app import DIALECTS
from worker.api.http import body as body_module
from worker.api.http.encoding import KEEPALIVE, LINE_KEEPALIVE
from worker.api.http.errors import error_response
from worker.api.http.off_loop import in_background
from worker.api.http.routes import Routes
from worker.errors import ConfigError, QueueFull
from worker.fleet import gateway as gateway_module
from worker.fleet import relay, upstream
from worker.fleet import workers as table_of_workers
from worker.fleet.settings import Fleet

pytestmark = pytest.mark.anyio

TOKEN = b'event: token\ndata: {"type":"token","t":"a","i":0}\n\n'
END = b'event: end\ndata: {"type":"end"}\n\n'
JOB = {"job_id": "j", "prompt": "Once"}
KEYLESS = {"job_id": "j"}
"""A request that goes to the first of the idle workers by name."""
is_full = tells(
    503, {"code": "QUEUE_FULL", "message": "full", "retriable": True}, "retry-after: 7\r\n"
)
drains = tells(503, {"code": "SHUTTING_DOWN", "message": "drains", "retriable": True})
crashes = tells(500, {"code": "ENGINE_CRASHED", "message": "x", "retriable": True})
knows_no_job = tells(404, {"code": "JOB_NOT_FOUND"})


async def answers(conversation: Conversation) -> None:
    await conversation.stream(TOKEN, END)
    await conversation.end()


async def vanishes(conversation: Conversation) -> None:
    """Vanish before the first token, without an answer."""


async def hangs(conversation: Conversation) -> None:
    await conversation.reader.read()


async def test_bytes_and_headers_pass() -> None:
    async with fleet_of(answers) as (gateway, _, (worker,)):
        headers = {"authorization": "Bearer t", "x-request-id": "me", "connection": "keep-alive"}
        got = await call(gateway, "/execute", JOB, headers=headers)
    assert (got.status, got.body) == (200, TOKEN + END)
    assert got.headers["x-llorch-worker"] == "tiny-0"
    (request,) = worker.requests
    assert request.line == "POST /execute HTTP/1.1"
    assert json.loads(request.body) == JOB
    assert request.headers["host"] == worker.uri.removeprefix("http://")
    assert request.headers["x-llorch-late-head"] == "1"
    assert request.headers["authorization"] == "Bearer secret of tiny-0"
    assert request.headers["x-request-id"] == got.headers["x-request-id"] == "me"
    assert request.headers["connection"] == "close"


async def test_a_header_of_the_connection_does_not_pass() -> None:
    """`Connection` names the headers that belong to the connection (RFC 9110, 7.6.1)."""
    headers = {"connection": "close, X-Mine", "x-mine": "1", "x-other": "1"}
    async with fleet_of(answers) as (gateway, _, (worker,)):
        await call(gateway, "/execute", JOB, headers=headers)
    assert "x-mine" not in worker.requests[0].headers and worker.requests[0].headers["x-other"]


@pytest.mark.parametrize("name", ["x-correlation-id", "x-request-id"])
async def test_a_request_has_one_name_in_all_logs(name: str) -> None:
    """Even if nothing remains of the client's own name."""
    async with fleet_of(answers) as (gateway, _, (worker,)):
        got = await call(gateway, "/execute", JOB, headers={name: "?!"})
    assert worker.requests[0].headers["x-request-id"] == got.headers["x-request-id"] != "?!"
    assert "x-correlation-id" not in worker.requests[0].headers


async def test_the_host_header_of_a_probe_brackets_an_ipv6_address() -> None:
    heard = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.set_result(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    try:
        server = await asyncio.start_server(serve, "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with server:
        port = server.sockets[0].getsockname()[1]
        await upstream.fetch(("::1", port), "GET", "/health")
        assert b"host: [::1]:%d\r\n" % port in await heard


async def test_a_workers_answer_is_freed_at_once() -> None:
    """It may have megabytes, for example of embeddings."""
    async with fleet_of(answers) as (_, table, _):
        (worker,) = table.workers()
        gc.disable()
        try:
            answer = await upstream.fetch(worker.address, "GET", "/health")
            assert answer is not None
            kept = weakref.ref(answer)
            del answer
            assert kept() is None
        finally:
            gc.enable()


async def longest_wait(calling: asyncio.Task[Got]) -> float:
    """Return the seconds for which the loop is blocked until the call is answered. Garbage
    collections are excluded, because they depend on earlier tests."""
    waits, held = [0.0], HoldClock()
    gc.disable()
    try:
        while not calling.done():
            await asyncio.sleep(0)
            waits.append(held.lap())
    finally:
        gc.enable()
    print(f"{max(waits) * 1000:.0f} ms")
    return max(waits)


async def test_reading_a_body_does_not_block_the_loop() -> None:
    """A body that a worker would refuse is forwarded unread; a large one is read by a thread."""
    for held in (b"{}", b"[0]"):
        body = b'{"model": "tiny", "x": [' + held + b", " + (held + b", ") * 700_000 + b"0]}"
        async with fleet_of(answers) as (gateway, _, (worker,)):
            calling = asyncio.create_task(call(gateway, "/execute", body))
            assert within(await longest_wait(calling), 0.1), held
            assert (await calling).status == 200 and worker.requests[0].body == body


async def test_metrics_of_many_workers_do_not_block_the_loop() -> None:
    """Reading and writing them takes most of the call's CPU time."""
    text = b"".join(b'a_bucket{le="%d"} 1\n' % n for n in range(500))

    async def tells(conversation: Conversation) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text)
        conversation.writer.write(head + text)

    async with fleet_of(tells) as (gateway, table, (worker,)):
        table.replace("tiny", at({f"tiny-{n}": worker.uri for n in range(40)}))
        began = time.process_time()
        calling = asyncio.create_task(call(gateway, "/metrics"))
        longest = await longest_wait(calling)
        assert longest < (time.process_time() - began) / 2
        assert (await calling).body.count(b"a_bucket{") == 20_000


async def test_a_failure_before_the_first_token_is_retried_elsewhere() -> None:
    for fails in (vanishes, is_full, drains, crashes):
        async with fleet_of(fails, answers) as (gateway, _, (first, _)):
            got = await call(gateway, "/execute", KEYLESS)
        assert (got.status, got.body) == (200, TOKEN + END), fails
        assert len(first.requests) == 1, fails


async def test_a_refused_connection_is_retried_elsewhere() -> None:
    async with fleet_of(answers) as (gateway, table, (worker,)):
        table.replace("tiny", at({"a": "http://127.0.0.1:1", "b": worker.uri}))
        got = await call(gateway, "/execute", KEYLESS)
        assert got.status == 200
        assert not table.workers()[0].is_well


async def test_a_request_does_not_crash_the_whole_fleet() -> None:
    async with fleet_of(*[crashes] * 5) as (gateway, _, workers):
        got = await call(gateway, "/execute", JOB)
    assert got.status == 500 and got.json["code"] == "ENGINE_CRASHED"
    assert sum(len(worker.requests) for worker in workers) == 2
    async with fleet_of(*[vanishes] * 5) as (gateway, _, workers):
        got = await call(gateway, "/execute", JOB)
    assert got.status == 500 and got.json["retriable"] is True
    assert sum(len(worker.requests) for worker in workers) == relay.MAX_LOSSES


@pytest.mark.parametrize(
    "path",
    [
        "/execute",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/completion",
        "/api/chat",
    ],
)
async def test_a_full_fleet_refuses_at_once_in_the_callers_dialect(path: str) -> None:
    form = Routes(DIALECTS).at(path).dialect.errors
    refused = error_response(QueueFull("full", retry_after_seconds=7), form, "id")
    refusal = json.loads(bytes(refused.body))
    is_full = tells(503, refusal, "retry-after: 7\r\n")
    async with fleet_of(is_full, is_full, drains) as (gateway, _, workers):
        async with asyncio.timeout(relay.REPLACEMENT_SECONDS / 2):
            got = await call(gateway, path, KEYLESS)
    assert (got.status, got.headers["retry-after"]) == (503, "7")
    assert got.json == refusal
    assert got.headers["x-llorch-worker"] in ("tiny-0", "tiny-1")
    assert all(len(worker.requests) == 1 for worker in workers[:2])


@pytest.mark.parametrize(
    ("path", "status", "body", "code"),
    [
        ("/execute", 400, {"code": "INVALID_REQUEST"}, "INVALID_REQUEST"),
        ("/v1/messages", 503, {"error": {"code": "queue_full"}}, "QUEUE_FULL"),
        ("/cancel", 404, {"code": "JOB_NOT_FOUND"}, "JOB_NOT_FOUND"),
        ("/api/chat", 403, {"error": "a text alone"}, "FORBIDDEN"),
        ("/execute", 200, {"code": "of an answer"}, None),
    ],
)
async def test_the_log_has_why_a_worker_refused_a_request(
    path: str, status: int, body: dict[str, object], code: str | None
) -> None:
    async with fleet_of(tells(status, body, "retry-after: 1\r\n")) as (gateway, _, _):
        with structlog.testing.capture_logs() as logs:
            assert (await call(gateway, path, JOB)).status == status
    assert [each["code"] for each in logs if each["event"] == "request.answered"] == [code]


async def test_a_request_waits_for_the_first_worker() -> None:
    async with fleet_of(answers) as (gateway, table, (worker,)):
        table.replace("tiny", at({}))
        waiting = asyncio.ensure_future(call(gateway, "/execute", JOB))
        await asyncio.sleep(0.3)
        table.replace("tiny", at({"new": worker.uri}))
        assert (await waiting).status == 200


async def test_a_request_waits_for_a_worker_until_its_deadline_at_most() -> None:
    async with fleet_of() as (gateway, _, _):
        began = time.monotonic()
        deadline = {"x-deadline": str(int(time.time() * 1000) + 500)}
        got = await call(gateway, "/execute", JOB, headers=deadline)
        assert (got.status, got.json["code"]) == (504, "INFERENCE_TIMEOUT")
        assert 0.4 < time.monotonic() - began < relay.REPLACEMENT_SECONDS / 2


async def test_the_one_worker_that_recovers_gets_the_request_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (relay, table_of_workers):
        monkeypatch.setattr(module, "AVOIDED_SECONDS", 0.05)
    calls = 0

    async def recovers(conversation: Conversation) -> None:
        nonlocal calls
        calls += 1
        await (drains if calls == 1 else answers)(conversation)

    async with fleet_of(recovers) as (gateway, _, _):
        assert (await call(gateway, "/execute", JOB)).status == 200


@pytest.mark.parametrize("n_workers", [1, 3])
async def test_workers_that_keep_refusing_are_not_asked_forever(
    n_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "REPLACEMENT_SECONDS", 0.5)
    for module in (relay, table_of_workers):
        monkeypatch.setattr(module, "AVOIDED_SECONDS", 0.05)
    async with fleet_of(*[drains] * n_workers) as (gateway, _, workers):
        began = time.monotonic()
        async with asyncio.timeout(10):
            got = await call(gateway, "/execute", JOB)
        assert time.monotonic() - began >= 0.5
        assert (got.status, got.json["code"], got.json["retriable"]) == (503, "SHUTTING_DOWN", True)
        assert all(len(worker.requests) > 1 for worker in workers), "one may recover meanwhile"


@pytest.mark.parametrize("n_lost", [1, relay.MAX_LOSSES])
@pytest.mark.parametrize("sent", [(), (b"event: token\ndata: {half an ev",)])
async def test_a_comment_of_the_gateway_does_not_bind_a_request_to_its_worker(
    n_lost: int, sent: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "KEEPALIVE_SECONDS", 0.05)

    async def is_lost(conversation: Conversation) -> None:
        await asyncio.sleep(0.2)
        await conversation.stream(*sent)
        await asyncio.sleep(0.05)

    async with fleet_of(*[is_lost] * n_lost, answers) as (gateway, _, workers):
        got = await call(gateway, "/execute", KEYLESS)
    assert (got.status, got.ended, got.chunks[0]) == (200, True, KEEPALIVE)
    assert all(len(worker.requests) == 1 for worker in workers[:-1])
    events = got.body.replace(KEEPALIVE, b"")
    if n_lost < relay.MAX_LOSSES:
        assert events == TOKEN + END
        assert workers[-1].requests[0].body == workers[0].requests[0].body
    else:
        assert events.startswith(b"event: error\n") and events.count(b"\n\n") == 1
        assert b"ENGINE_CRASHED" in events and not workers[-1].requests


async def test_any_bytes_of_a_worker_bind_a_request_to_it() -> None:
    """Even its comments, because a client that resumes at a byte counts them."""

    async def is_lost(conversation: Conversation) -> None:
        await conversation.stream(KEEPALIVE)
        await asyncio.sleep(0.05)

    async with fleet_of(is_lost, answers) as (gateway, _, (_, other)):
        headers = {"x-conversation-id": "c"}
        got = await call(gateway, "/execute", KEYLESS, headers=headers)
    assert got.body.startswith(KEEPALIVE + b"event: error\n") and not other.requests


async def test_a_gateway_without_a_file_left_blames_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own failed probes are not silent workers, whose streams it would end."""

    async def refused(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with fleet_of(answers) as (gateway, table, (worker,)):
        monkeypatch.setattr(asyncio, "open_connection", refused)
        got = await call(gateway, "/execute", JOB)
        assert (got.status, got.json["code"]) == (503, "QUEUE_FULL") and got.headers["retry-after"]
        for _ in range(table_of_workers.MAX_MISSES):
            await table_of_workers.probe(table.workers()[0])
        assert table.workers()[0].is_well and not worker.requests


async def closes_early(conversation: Conversation) -> None:
    """Close cleanly: only the last event is missing."""
    await conversation.stream(TOKEN)
    await conversation.end()


async def test_a_stream_without_its_last_event_is_not_whole() -> None:
    async with fleet_of(closes_early) as (gateway, _, _):
        got = await call(gateway, "/execute", JOB)
    assert got.body.startswith(TOKEN + b"event: error\n") and b"ENGINE_CRASHED" in got.body


async def test_an_empty_stream_is_retried_elsewhere() -> None:
    async def says_nothing(conversation: Conversation) -> None:
        await conversation.stream()
        await conversation.end()

    async with fleet_of(says_nothing, answers) as (gateway, _, (first, _)):
        got = await call(gateway, "/execute", KEYLESS)
    assert got.body == TOKEN + END and first.requests


async def test_a_client_that_resumes_after_the_last_event_gets_nothing_more() -> None:
    """Or at a byte inside it, although it is not known to be the last."""
    for rest in ((), (b'd"}\n\n',)):

        async def goes_on(conversation: Conversation, rest: tuple[bytes, ...] = rest) -> None:
            await conversation.stream(*rest)
            await conversation.end()

        async with fleet_of(goes_on) as (gateway, _, _):
            got = await call(gateway, "/execute/j", headers={"x-llorch-worker": "tiny-0"})
        assert (got.status, got.body) == (200, b"".join(rest))


async def test_a_client_that_leaves_frees_its_worker() -> None:
    gone = asyncio.Event()

    async def endless(conversation: Conversation) -> None:
        await conversation.stream(TOKEN)
        await conversation.reader.read()
        gone.set()

    async with fleet_of(endless) as (gateway, table, _):
        await call(gateway, "/execute", JOB, leave_after_chunks=1)
        async with asyncio.timeout(30):
            await gone.wait()
        assert table.workers()[0].running == []


@pytest.mark.parametrize("factor", [0.02, pytest.param(1, marks=pytest.mark.long)])
async def test_a_worker_that_accepts_connections_but_never_answers_is_found(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a stopped process, or a machine whose disk is gone: its kernel still listens."""
    for module, name in ((table_of_workers, "PROBE_EVERY_SECONDS"), (upstream, "FETCH_SECONDS")):
        monkeypatch.setattr(module, name, factor * getattr(module, name))
    async with fleet_of(hangs, answers) as (gateway, table, (silent, other)):
        watching = asyncio.create_task(table_of_workers.watch(table))
        began = time.monotonic()
        async with asyncio.timeout(max(60 * factor, 20)):
            got = await call(gateway, "/execute", KEYLESS)
        seconds = time.monotonic() - began
        watching.cancel()
        assert got.status == 200 and got.body.endswith(TOKEN + END)
        for worker in (silent, other):
            assert len([each for each in worker.requests if "/execute" in each.line]) == 1
        assert table.choose("tiny", None, ()) is table.workers()[1]
    print(f"silent worker: its request was answered by another after {seconds:.1f} s")
    assert seconds <= max(30 * factor, 10)


async def test_a_worker_that_missed_its_last_probe_delays_no_answer_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None takes a probe's whole timeout until the worker is given up."""
    monkeypatch.setattr(upstream, "FETCH_SECONDS", 0.1)
    monkeypatch.setattr(upstream, "BRIEF_SECONDS", 0.1)
    async with fleet_of(hangs, tells(404, {"code": "JOB_NOT_FOUND"})) as (gateway, table, _):
        await table_of_workers.probe(table.workers()[0])
        monkeypatch.setattr(upstream, "FETCH_SECONDS", 60.0)
        async with asyncio.timeout(20):
            assert (await call(gateway, "/metrics")).status == 200
            assert (await call(gateway, "/load")).status == 404
            assert (await call(gateway, "/cancel", {"job_id": "unknown"})).status == 404


async def test_the_error_for_a_large_body_names_the_fleets_own_setting() -> None:
    async with fleet_of(answers) as (gateway, _, (worker,)):
        got = await call(gateway, "/execute", b" " * (16 * 2**20 + 1))
    assert got.status == 413 and "max_body_bytes above the workers" in got.json["message"]
    assert not worker.requests


async def test_a_worker_that_falls_silent_after_it_left_its_group_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray drops a disconnected machine before a gateway does."""
    for module, name in ((table_of_workers, "PROBE_EVERY_SECONDS"), (upstream, "FETCH_SECONDS")):
        monkeypatch.setattr(module, name, 0.02 * getattr(module, name))

    async def falls_silent(conversation: Conversation) -> None:
        if "/execute" in conversation.line:
            await conversation.stream(TOKEN)
        await conversation.reader.read()

    async with fleet_of(falls_silent) as (gateway, table, (worker,)):
        reading = asyncio.create_task(call(gateway, "/execute", JOB))
        await until(lambda: bool(worker.requests))
        table.replace("tiny", at({}))
        watching = asyncio.create_task(table_of_workers.watch(table))
        async with asyncio.timeout(10):
            got = await reading
            assert got.ended and b"ENGINE_CRASHED" in got.body.removeprefix(TOKEN)
            await until(lambda: not table.all_workers())
        watching.cancel()


@pytest.mark.parametrize("counts_bytes", [False, True])
async def test_a_long_prefill_keeps_its_client(
    counts_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a comment; but a client that resumes at a byte gets only the worker's bytes, as they
    come."""
    monkeypatch.setattr(relay, "KEEPALIVE_SECONDS", 0.05)
    release = asyncio.Event()
    headers = {"x-conversation-id": "c"} if counts_bytes else {}

    async def slow(conversation: Conversation) -> None:
        assert ("x-llorch-late-head" in conversation.headers) is not counts_bytes
        await release.wait()
        await answers(conversation)

    async with fleet_of(slow, slow) as (gateway, _, _):
        waiting = asyncio.ensure_future(call(gateway, "/execute", JOB, headers=headers))
        await asyncio.sleep(0.3)
        release.set()
        got = await waiting
    assert (got.chunks[0] == KEEPALIVE) is not counts_bytes
    assert got.body.replace(KEEPALIVE, b"") == TOKEN + END


@pytest.mark.parametrize(
    ("path", "body", "accept", "sign"),
    [
        ("/v1/chat/completions", {"stream": True}, "", KEEPALIVE),
        ("/api/chat", {}, "", LINE_KEEPALIVE),
        ("/api/chat", {"stream": None}, "", LINE_KEEPALIVE),
        ("/v1/inference", {}, "application/x-ndjson", LINE_KEEPALIVE),
        ("/v1/chat/completions", {}, "text/event-stream", None),
        ("/api/chat", {"stream": False}, "application/x-ndjson", None),
        ("/v1/inference", {}, "", None),
    ],
)
async def test_a_client_gets_signs_of_life_in_the_form_of_the_stream_that_it_asked_for(
    path: str,
    body: dict[str, object],
    accept: str,
    sign: bytes | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "KEEPALIVE_SECONDS", 0.05)

    async def fails_late(conversation: Conversation) -> None:
        await asyncio.sleep(0.2)
        await conversation.json(400, {"code": "INVALID_REQUEST", "message": "not like that"})

    async with fleet_of(fails_late) as (gateway, _, _):
        got = await call(gateway, path, body, headers={"accept": accept})
    if sign is None:
        assert got.status == 400
    else:
        media_type = "text/event-stream" if sign == KEEPALIVE else "application/x-ndjson"
        assert (got.status, got.headers["content-type"].split(";")[0]) == (200, media_type)
        assert got.chunks[0] == sign and len(got.body) > len(sign)
    assert got.ended and b"not like that" in got.chunks[-1]


async def test_a_duplicate_and_a_cancel_go_to_the_worker_that_has_the_job() -> None:
    async def script(conversation: Conversation) -> None:
        if "/cancel" in conversation.line:
            await conversation.json(202, {"job_id": "j"})
        elif sum("/execute" in each.line for w in workers for each in w.requests) > 1:
            await conversation.json(409, {"code": "DUPLICATE_JOB"})
        else:
            await conversation.stream(TOKEN)
            await conversation.reader.read()

    async with fleet_of(script, script, script) as (gateway, _, workers):
        first = asyncio.ensure_future(call(gateway, "/execute", JOB, leave_after_chunks=None))
        await until(lambda: any(worker.requests for worker in workers))
        having = [worker for worker in workers if worker.requests]
        assert (await call(gateway, "/execute", {**JOB, "prompt": "other"})).status == 409
        assert (await call(gateway, "/cancel", {"job_id": "j"})).status == 202
        assert [len(worker.requests) for worker in having] == [3]
        first.cancel()


async def test_a_jobs_id_is_free_once_its_client_has_the_end() -> None:
    """After an error at the end of a stream, a client may send the job again at once."""
    hold = asyncio.Event()

    async def script(conversation: Conversation) -> None:
        await conversation.stream(TOKEN, END)
        await hold.wait()
        await conversation.end()

    async with fleet_of(script, script) as (gateway, table, workers):
        came = Got()
        first = asyncio.create_task(call(gateway, "/execute", JOB, got=came))
        await until(lambda: came.body == TOKEN + END)
        for each in table.workers():
            if each.running:
                each.avoid()
        again = asyncio.create_task(call(gateway, "/execute", JOB))
        await asyncio.sleep(0.1)
        hold.set()
        assert [(await each).body for each in (first, again)] == [TOKEN + END] * 2
        assert [len(worker.requests) for worker in workers] == [1, 1]
        assert not gateway._jobs


async def test_a_cancel_reaches_a_worker_that_still_reads_the_job() -> None:
    """Or its client would be told that a job is cancelled which then runs to its end."""
    n_refused, cancelled = 0, asyncio.Event()

    async def script(conversation: Conversation) -> None:
        nonlocal n_refused
        if "/execute" in conversation.line:
            await cancelled.wait()
            return await conversation.json(499, {"code": "CANCELLED"})
        n_refused += 1
        if n_refused < 3:
            return await conversation.json(404, {"code": "JOB_NOT_FOUND"})
        cancelled.set()
        return await conversation.json(202, {"job_id": "j"})

    async with fleet_of(script) as (gateway, _, (worker,)):
        running = asyncio.create_task(call(gateway, "/execute", JOB))
        await until(lambda: bool(worker.requests))
        assert (await call(gateway, "/cancel", {"job_id": "j"})).status == 202
        assert (await running).status == 499


async def test_a_cancel_that_its_worker_does_not_know_is_accepted_if_the_job_ends() -> None:
    cancelled = asyncio.Event()

    async def script(conversation: Conversation) -> None:
        if "/execute" in conversation.line:
            await cancelled.wait()
            return await conversation.json(400, {"code": "INVALID_REQUEST"})
        await conversation.json(404, {"code": "JOB_NOT_FOUND"})
        cancelled.set()

    async with fleet_of(script) as (gateway, _, (worker,)):
        running = asyncio.create_task(call(gateway, "/execute", JOB))
        await until(lambda: bool(worker.requests))
        with structlog.testing.capture_logs() as logs:
            assert (await call(gateway, "/cancel", {"job_id": "j"})).status == 202
        assert (await running).status == 400
    assert [each["code"] for each in logs if each.get("path") == "/cancel"] == [None]


async def test_a_job_that_is_cancelled_while_it_waits_reaches_no_worker() -> None:
    """Or its client would be told that a job is cancelled which then runs to its end."""
    async with fleet_of(answers) as (gateway, table, (worker,)):
        found = table.workers()
        table.replace("tiny", [])
        waiting = asyncio.create_task(call(gateway, "/v1/inference", JOB))
        await asyncio.sleep(0.05)
        assert (await call(gateway, "/cancel", {"job_id": "j"})).status == 202
        table.replace("tiny", found)
        got = await waiting
    assert (got.status, got.json["code"]) == (499, "CANCELLED")
    assert not worker.requests


async def test_a_cancel_at_a_named_worker_is_no_duplicate_of_its_job() -> None:
    async with fleet_of(answers, answers, groups=("tiny", "other")) as (gateway, table, _):
        table.replace("tiny", [])
        waiting = asyncio.create_task(call(gateway, "/v1/inference", JOB))
        await asyncio.sleep(0.05)
        named = {"x-llorch-worker": "other-0"}
        assert (await call(gateway, "/cancel", {"job_id": "j"}, headers=named)).status == 200
        waiting.cancel()


@pytest.mark.parametrize(("query", "status"), [(b"x=\xff", 200), (b"model=%ff", 404)])
async def test_a_query_that_is_not_utf_8_is_not_an_error_of_the_gateway(
    query: bytes, status: int
) -> None:
    async with fleet_of(answers) as (gateway, _, _):
        got = await call(gateway, "/v1/chat/completions", {"messages": []}, query=query)
        assert got.status == status


async def test_a_cancel_of_an_unknown_job_goes_to_all() -> None:
    async with fleet_of(knows_no_job, tells(202, {"job_id": "j"})) as (gateway, _, _):
        assert (await call(gateway, "/cancel", {"job_id": "j"})).status == 202
    async with fleet_of(knows_no_job, knows_no_job) as (gateway, _, _):
        assert (await call(gateway, "/cancel", {"job_id": "j"})).status == 404


async def test_several_models() -> None:
    async def models(conversation: Conversation) -> None:
        field = "models" if "/api/" in conversation.line else "data"
        await conversation.json(200, {field: [{"id": conversation.headers["host"]}]})

    async with fleet_of(models, models, groups=("one", "two")) as (gateway, _, workers):
        for path, field in (("/v1/models", "data"), ("/api/tags", "models"), ("/api/ps", "models")):
            got = await call(gateway, path)
            assert [each["id"] for each in got.json[field]] == [w.uri[7:] for w in workers]
        for n, name in enumerate(("one", "two")):
            await call(gateway, "/v1/chat/completions", {"model": name, "messages": []})
            assert "chat" in workers[n].requests[-1].line
            await call(gateway, "/api/chat", {"model": f"{name}:latest", "messages": []})
            assert "/api/chat" in workers[n].requests[-1].line
        got = await call(gateway, "/v1/chat/completions", {"model": "three"})
    assert (got.status, got.json["error"]["code"]) == (404, "model_not_found")
    assert "one, two" in got.json["error"]["message"]


async def test_an_answer_to_head_ends_with_its_headers() -> None:
    """The worker announces the length of a body that does not come."""

    async def script(conversation: Conversation) -> None:
        conversation.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n")
        await conversation.reader.read()

    async with fleet_of(script) as (gateway, table, _):
        async with asyncio.timeout(5):
            got = await call(gateway, "/info", method="HEAD")
            assert (await call(gateway, "/models/sse", method="HEAD")).status == 200
        assert (got.status, got.headers["content-length"], got.body) == (200, "500", b"")
        assert table.workers()[0].is_well


async def test_a_model_is_named_by_any_field_or_path_that_may_name_it() -> None:
    script = tells(200, {})
    async with fleet_of(script, script, groups=("one", "two")) as (gateway, _, workers):
        for path, body in (
            ("/api/show", {"model": "two:latest"}),
            ("/api/show", {"name": "two"}),
            ("/v1/models/two", None),
            ("/v1/completions", {"model": "two", "prompt": "a"}),
        ):
            before = len(workers[1].requests)
            assert (await call(gateway, path, body)).status == 200, path
            assert len(workers[1].requests) == before + 1, path
        assert workers[0].requests == []
        assert (await call(gateway, "/api/show", {"name": "three"})).status == 404


async def test_a_name_belongs_to_the_old_group_while_a_new_one_starts() -> None:
    async with fleet_of(answers, answers, groups=("old", "new")) as (gateway, _, workers):
        settings = {"served_model_name": ["m"]}
        groups = [{"name": name, "settings": settings} for name in ("old", "new")]
        gateway.use(Fleet.model_validate({"workers": groups}))
        assert (await call(gateway, "/v1/completions", {"model": "m"})).status == 200
        assert [len(worker.requests) for worker in workers] == [1, 0]


async def test_clients_need_the_fleets_current_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    async with fleet_of(answers) as (gateway, table, (worker,)):
        fleet = {"token_file": str(file), "workers": [{"name": "tiny"}]}
        gateway.use(Fleet.model_validate(fleet))

        async def status(token: str) -> int:
            headers = {"authorization": f"Bearer {token}"} if token else {}
            return (await call(gateway, "/execute", JOB, headers=headers)).status

        assert [await status(token) for token in ("", "first", "second")] == [401, 200, 401]
        assert await status(table.workers()[0].token) == 401, "a worker's own is no client's"
        (request,) = worker.requests
        assert "first" not in request.headers.values()
        file.with_suffix(".new").write_text("second")
        file.with_suffix(".new").replace(file)
        os.utime(file, ns=(1, 1))
        assert [await status(token) for token in ("first", "second")] == [401, 200]
        file.write_text("")
        assert await status("") == 401 and await status("second") == 200
        file.unlink()
        assert await status("") == 401 and await status("second") == 200
        assert (await call(gateway, "/ready")).json["workers"][0].keys() == {
            "id", "model", "running", "well",
        }  # fmt: skip
        with pytest.raises(ConfigError, match="cannot be read"):
            gateway.use(Fleet.model_validate(fleet | {"workers": [{"name": "other"}]}))
        assert await status("") == 401 and await status("second") == 200, "as before"


async def test_keys_that_cannot_be_read_are_logged_once_for_each_change(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann:sk-1\n")
    async with fleet_of(answers) as (gateway, _, _):
        fleet = {"api_key_file": str(file), "workers": [{"name": "tiny"}]}
        gateway.use(Fleet.model_validate(fleet))
        for text, n_told in (("no key", 1), ("ann:sk-1\nann:sk-2", 1), ("ann:sk-1\n", 0)):
            file.write_text(text)
            with structlog.testing.capture_logs() as logs:
                for _ in range(3):
                    got = await call(gateway, "/execute", JOB, headers={"x-api-key": "sk-1"})
                    assert got.status == 200, "those that were read last hold"
            messages = [each["message"] for each in logs if each["event"] == "keys.unreadable"]
            assert len(messages) == n_told and all("line" in each for each in messages)
            assert not [each for each in messages if "sk-" in each]


async def test_clients_may_have_keys_with_names(tmp_path: Path) -> None:
    """With or without the token; logs and metrics have the name and never the key."""
    file, token = tmp_path / "keys", tmp_path / "token"
    file.write_text("ann:sk-1\nbob:sk-2\nidle:sk-9\n")
    token.write_text("sk-3")

    async def without_metrics(conversation: Conversation) -> None:
        if "/metrics" not in conversation.line:
            await answers(conversation)

    async with fleet_of(without_metrics) as (gateway, _, _):
        fleet = {"workers": [{"name": "tiny"}], "api_key_file": str(file)}

        async def statuses() -> list[int]:
            heads = [{"authorization": f"Bearer sk-{n}"} for n in range(4)]
            return [(await call(gateway, "/execute", JOB, headers=head)).status for head in heads]

        with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logs:
            gateway.use(Fleet.model_validate(fleet))
            assert await statuses() == [401, 200, 200, 401]
            gateway.use(Fleet.model_validate({**fleet, "token_file": str(token)}))
            assert await statuses() == [401, 200, 200, 200]
        logged = [each.get("key") for each in logs if each["event"] == "request.answered"]
        assert logged == [None, "ann", "bob", None, None, "ann", "bob", "token"]
        counted = (await call(gateway, "/metrics")).body.decode()
        for name, count in {"ann": 2, "bob": 2, "token": 1, "idle": 0}.items():
            line = f'worker_key_requests_total{{key="{name}",model="",worker="gateway"}} {count}.0'
            assert line in counted
        assert "sk-" not in f"{logs}{counted}"
        file.write_text("ann:sk-0")
        assert await statuses() == [200, 401, 401, 200]
        with pytest.raises(ConfigError, match="it must be NAME:KEY"):
            file.write_text("half a line")
            gateway.use(Fleet.model_validate(fleet))


async def test_forbidden_requests_reach_no_worker() -> None:
    async with fleet_of(answers) as (gateway, _, (worker,)):
        for path in ("/shutdown", "/chat/shutdown"):  # the pages use the API below their path
            assert (await call(gateway, path, {})).status == 403
        refused = await call(gateway, "/v1/models", headers={"host": "evil.example"})
        assert refused.status == 403
        hint = "allow_host in the settings of the fleet's first workers adds one"
        assert hint in refused.json["error"]["message"]
        origin = {"origin": "https://evil.example"}
        assert (await call(gateway, "/execute", JOB, headers=origin)).status == 403
        large = {"job_id": "j", "prompt": "x" * 5_000_000}
        assert (await call(gateway, "/execute", large)).json["code"] == "PAYLOAD_TOO_LARGE"
        assert worker.requests == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("UDS", "/tmp/a"), ("ADVERTISE_HOST", "evil.example"), ("SSL_CERTFILE", "a"), ("PORT", "a")],
)
async def test_variables_of_a_single_worker_do_not_apply_to_a_fleet(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell that started Ray may have had them: with a Unix socket, no Host was checked."""
    monkeypatch.setenv(f"LLORCH_{name}", value)
    async with fleet_of(answers) as (gateway, _, _):
        evil = {"host": "evil.example"}
        assert (await call(gateway, "/v1/models", headers=evil)).status == 403
        assert (await call(gateway, "/execute", JOB)).status == 200


async def test_states() -> None:
    async with fleet_of(answers) as (gateway, table, _):
        assert (await call(gateway, "/ready")).json["state"] == "idle"
        table.replace("tiny", at({}))
        assert (await call(gateway, "/ready")).status == 503
        assert (await call(gateway, "/health")).status == 200


async def test_bodies_that_wait_for_their_parser_are_limited_in_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_module, "MAX_BODY_BYTES_AT_ONCE", 5_000_000)
    free = threading.Event()
    body = {"job_id": "j", "prompt": "x" * 3_000_000}
    async with fleet_of(answers) as (gateway, _, _):
        busy = asyncio.create_task(in_background(free.wait))
        waiting = asyncio.create_task(call(gateway, "/execute", body))
        await until(lambda: gateway.body_bytes >= 3_000_000)
        refused = asyncio.create_task(call(gateway, "/execute", body))
        await asyncio.wait({refused}, timeout=10)
        free.set()
        got = await refused
        assert (got.status, got.json["code"]) == (503, "QUEUE_FULL") and got.headers["retry-after"]
        assert (await waiting).status == 200 and await busy
        assert gateway.body_bytes == 0


async def test_requests_for_what_any_worker_may_have_go_to_all() -> None:
    """A command to a running answer, and a lookup of kept streams; of several, the latest
    counts."""

    def worker(success: bool, *streams: tuple[str, int, bool]) -> Script:
        async def script(conversation: Conversation) -> None:
            if "lookup" in conversation.line:
                keys = ("conversation_id", "started_at", "is_done")
                listed = [dict(zip(keys, each, strict=True)) for each in streams]
                await conversation.json(200, listed)
            else:
                await conversation.json(200, {"success": success}, "x-ignored-fields: odd\r\n")

        return script

    streams = ("a", 1, True), ("b", 5, True)
    others = ("a", 2, True), ("b", 5, False)
    async with fleet_of(worker(False, *streams), worker(True, *others)) as (gateway, _, _):
        order = {"id": "chatcmpl-1", "action": "reasoning_end"}
        assert (await call(gateway, "/v1/chat/completions/control", order)).json["success"]
        got = await call(gateway, "/v1/streams/lookup", {"conversation_ids": ["a", "b"]})
        kept = {each["conversation_id"]: each for each in got.json}
        assert kept["a"]["started_at"] == 2 and not kept["b"]["is_done"] and len(got.json) == 2
    async with fleet_of(worker(False), worker(False)) as (gateway, _, _):
        got = await call(gateway, "/v1/chat/completions/control", order)
        assert got.status == 200 and got.json == {"success": False}
        assert got.headers["x-ignored-fields"] == "odd"


async def test_the_load_is_that_of_all_workers() -> None:
    async with fleet_of(*(tells(200, {"server_load": n}) for n in (2, 5))) as (gateway, _, _):
        got = await call(gateway, "/load", method="GET")
        assert got.json == {"server_load": 7} and "x-llorch-worker" not in got.headers


async def test_an_answer_without_a_body_has_no_content_length() -> None:
    """For a 204 (RFC 9110, 8.6), or a HEAD, where it would claim that a GET has no body."""

    async def says_nothing(conversation: Conversation) -> None:
        head = b"HTTP/1.1 200 OK\r\n" if "HEAD" in conversation.line else b"HTTP/1.1 204 X\r\n"
        conversation.writer.write(head + b"content-type: text/plain\r\n\r\n")

    named = {"x-llorch-worker": "tiny-0"}
    async with fleet_of(says_nothing) as (gateway, _, _):
        deleted = await call(
            gateway, "/v1/stream", method="DELETE", query=b"conv_id=c", headers=named
        )
        only_head = await call(gateway, "/v1/models", method="HEAD", headers=named)
    assert (deleted.status, only_head.status) == (204, 200)
    assert not {"content-length"} & (deleted.headers.keys() | only_head.headers.keys())


async def test_the_answer_of_one_of_all_is_forwarded_unchanged() -> None:
    async def ends_it(conversation: Conversation) -> None:
        conversation.writer.write(b"HTTP/1.1 204 No Content\r\nx-own: 1\r\n\r\n")
        await conversation.writer.drain()

    async with fleet_of(knows_no_job, ends_it) as (gateway, _, _):
        got = await call(gateway, "/v1/stream", method="DELETE", query=b"conv_id=a")
        assert (got.status, got.body, got.headers["x-own"]) == (204, b"", "1")
        assert got.headers["x-llorch-worker"] == "tiny-1" and "content-type" not in got.headers


@pytest.mark.parametrize("path", ["/v1/stream", "/execute/j"])
async def test_a_kept_stream_is_read_from_the_worker_where_it_last_began(path: str) -> None:
    def keeper(began: float, text: bytes) -> Script:
        async def script(conversation: Conversation) -> None:
            tail = b"transfer-encoding: chunked\r\nx-llorch-began: %f\r\n\r\n" % began
            conversation.writer.write(SSE_HEAD.replace(b"transfer-encoding: chunked\r\n\r\n", tail))
            if not conversation.line.startswith("HEAD"):
                await conversation.chunk(text + END)
                await conversation.end()

        return script

    keepers = knows_no_job, keeper(5.0, b"data: old\n\n"), keeper(5.5, TOKEN)
    async with fleet_of(*keepers, groups=("one", "two", "three")) as (gateway, _, workers):
        got = await call(gateway, path, headers={"last-event-id": "3"})
        assert got.body == TOKEN + END and got.headers["x-llorch-worker"] == "three-0"
        (request,) = [each for each in workers[2].requests if each.line.startswith("GET")]
        assert request.headers["last-event-id"] == "3" and path in request.line
    async with fleet_of(knows_no_job, knows_no_job) as (gateway, _, _):
        assert (await call(gateway, path)).status == 404
    async with fleet_of(keeper(5.0, TOKEN)) as (gateway, table, _):
        table.replace("tiny", at({}))
        assert (await call(gateway, path)).body == TOKEN + END, "it drains, and ends its streams"


async def test_a_request_may_name_its_worker() -> None:
    async with fleet_of(answers, answers, groups=("one", "two")) as (gateway, _, workers):
        for id in ("two-0", "one-0"):
            got = await call(gateway, "/execute", JOB, headers={"x-llorch-worker": id})
            assert got.headers["x-llorch-worker"] == id
        assert [len(worker.requests) for worker in workers] == [1, 1]
        got = await call(gateway, "/execute", JOB, headers={"x-llorch-worker": "three-0"})
        assert got.status == 404 and "no worker 'three-0'" in got.json["message"]
        headers = {"x-llorch-worker": "two-0"}
        assert (await call(gateway, "/shutdown", {}, headers=headers)).status == 403
        for path in ("/sleep", "/wake_up", "/lora-adapters"):  # they change one worker
            got = await call(gateway, path, {})
            assert got.status == 400 and "X-Llorch-Worker" in str(got.json), path
            assert (await call(gateway, path, {}, headers=headers)).status == 200
        assert [len(worker.requests) for worker in workers] == [1, 4]


async def test_a_worker_that_drains_may_be_named() -> None:
    async def keeps(conversation: Conversation) -> None:
        await (answers if "GET" in conversation.line else drains)(conversation)

    named = {"x-llorch-worker": "tiny-0"}
    async with fleet_of(keeps) as (gateway, table, _):
        table.replace("tiny", at({}))
        assert (await call(gateway, "/execute/j", headers=named)).body == TOKEN + END
        assert (await call(gateway, "/execute", JOB, headers=named)).json["code"] == "SHUTTING_DOWN"


async def test_the_chat_page_sees_a_router_of_several_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def props(conversation: Conversation) -> None:
        await conversation.json(200, {"model_alias": conversation.headers["host"]})

    async with fleet_of(props, props, groups=("one", "two")) as (gateway, _, workers):
        assert (await call(gateway, "/chat/props")).json["role"] == "router"
        got = await call(gateway, "/chat/props", query=b"model=two&autoload=false")
        assert got.json == {"model_alias": workers[1].uri[7:]}
        assert "/chat" not in workers[1].requests[-1].line, "a worker may have no page"
        assert (await call(gateway, "/props", query=b"model=three")).status == 404
        monkeypatch.setattr(gateway_module, "FEED_SECONDS", 0.2)
        began = time.monotonic()
        got = await call(gateway, "/chat/models/sse")
        assert got.headers["content-type"].startswith("text/event-stream") and got.body == b""
        assert time.monotonic() - began > 0.19, "it would be asked for every second"
    async with fleet_of(props, props) as (gateway, _, _):
        assert "role" not in (await call(gateway, "/chat/props")).json


async def test_concurrent_requests_for_metrics_share_one_scrape() -> None:
    async def tells(conversation: Conversation) -> None:
        conversation.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\na 1\n")

    async with fleet_of(tells) as (gateway, _, (worker,)):
        answers = await asyncio.gather(*(call(gateway, "/metrics") for _ in range(20)))
        assert {(got.status, got.body.splitlines()[-1]) for got in answers} == {
            (200, b'a{model="tiny",worker="tiny-0"} 1.0')
        }
        assert len(worker.requests) == 1


async def test_bodies_of_requests_without_an_answer_are_limited_in_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bodies of requests whose answers have begun are freed."""
    monkeypatch.setattr(gateway_module, "MAX_HELD_BYTES", 0)  # the largest single one still counts
    begin, end = asyncio.Event(), asyncio.Event()

    async def answers_late(conversation: Conversation) -> None:
        await begin.wait()
        await conversation.stream(TOKEN)
        await end.wait()
        await conversation.chunk(END)
        await conversation.end()

    async with fleet_of(answers_late) as (gateway, _, (worker,)):

        def ask(job_id: str) -> asyncio.Task[Got]:
            body = {"job_id": job_id, "prompt": "x" * 3_000_000}
            return asyncio.create_task(call(gateway, "/execute", body))

        first = ask("a")
        await until(lambda: bool(worker.requests))
        refused = await ask("b")
        assert (refused.status, refused.json["code"]) == (503, "QUEUE_FULL")
        assert int(refused.headers["retry-after"]) >= 1
        begin.set()
        await until(lambda: not any(each.body for each in gateway._asks))
        second = ask("c")
        await until(lambda: len(worker.requests) == 2)
        end.set()
        assert [(await each).body for each in (first, second)] == [TOKEN + END] * 2
        assert not gateway._asks
