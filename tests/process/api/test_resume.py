"""Streams that outlive their readers: if they are cut anywhere and resumed, nothing is lost or
repeated."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.held import holding
from tests.support.scripted_api import ScriptedFactory, story
from tests.support.worker import WorkerProcess, asking, new_job_id, until
from worker.api.http.encoding import KEEPALIVE
from worker.api.http.headers import ECHOED_IDS

RESUME = {"x-llorch-resume": "1"}
JOB = {"job_id": "j", "prompt": "x"}
LONG: Any = {"prompt": "Once upon a time", "max_tokens": 480, "temperature": 0, "ignore_eos": True}
CHAT: Any = {
    "model": "m",
    "messages": [{"role": "user", "content": "Tell a story."}],
    "max_tokens": 200,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


class Cut(Exception):
    """The reader has disconnected."""


def read(response: httpx.Response, most: int) -> Iterator[bytes]:
    """Yield whole events until `most` bytes have come; then the connection is cut."""
    rest, n_bytes = b"", 0
    for chunk in response.iter_raw():
        chunk = chunk[: most - n_bytes]
        n_bytes += len(chunk)
        *events, rest = (rest + chunk).split(b"\n\n")
        yield from events
        if n_bytes >= most:
            raise Cut


def field(event: bytes, name: str) -> str | None:
    for line in event.decode().split("\n"):
        if line.startswith(f"{name}: "):
            return line.removeprefix(f"{name}: ")
    return None


def gone_on(
    client: httpx.Client, name: str, last: str | None, most: int
) -> tuple[list[bytes], bool]:
    headers = {} if last is None else {"Last-Event-ID": last}
    events: list[bytes] = []
    with client.stream("GET", f"/execute/{name}", headers=headers) as response:
        assert response.status_code == 200, response.read()
        try:
            events.extend(read(response, most))
        except Cut:
            return events, False
    return events, True


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("заказ 1", "%D0%B7%D0%B0%D0%BA%D0%B0%D0%B7%201"),
        ("a\rb: c", "a%0Db:%20c"),
        ("50%?", "50%25%3F"),
        ("a/b:c@d", "a/b:c@d"),
        ("/a//", "/a%2F%2F"),
        ("/", "%2F"),
        ("two\nlines\n", "two%0Alines%0A"),
    ],
)
def test_a_stream_of_any_name_is_found_by_its_header(
    worker: WorkerProcess, name: str, header: str
) -> None:
    body = {"job_id": name, "prompt": "Once", "max_tokens": 2}
    with worker.client() as client:
        begun = client.post("/execute", json=body, headers=RESUME)
        assert (begun.status_code, begun.headers["x-llorch-resume"]) == (200, header)
        again = client.get(f"/execute/{header}", headers={"Last-Event-ID": "0"})
    assert again.status_code == 200 and begun.content.endswith(again.content)


@pytest.mark.parametrize("name", [".", ".."])
def test_a_resumable_stream_named_like_a_relative_path_is_refused(
    worker: WorkerProcess, name: str
) -> None:
    body = {"job_id": name, "prompt": "Once", "max_tokens": 2}
    refused = worker.post("/execute", body, RESUME)
    assert refused.status_code == 400
    assert [fault["field"] for fault in refused.json()["errors"]] == ["job_id"]
    assert worker.post("/execute", body).status_code == 200


def test_a_stream_cut_at_200_places_loses_no_token_and_repeats_none(worker: WorkerProcess) -> None:
    whole = worker.post("/v1/inference", LONG).json()
    dice = random.Random(5)
    name, n_cuts, last = new_job_id(), 0, None
    tokens: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    with worker.client() as client:
        body = LONG | {"job_id": name}
        with client.stream("POST", "/execute", json=body, headers=RESUME) as response:
            assert response.headers["x-llorch-resume"] == name
        is_done = False
        while not is_done:
            events, is_done = gone_on(client, name, last, dice.randint(1, 300))
            n_cuts += 1
            for event in events:
                last = field(event, "id") or last
                if data := field(event, "data"):
                    parsed = json.loads(data)
                    if parsed["type"] == "token":
                        assert field(event, "id") == str(parsed["i"]), "its id is its index"
                        tokens.append(parsed)
                    elif parsed["type"] == "end":
                        ends.append(parsed)
        assert n_cuts > 200
        assert [token["i"] for token in tokens] == list(range(len(tokens)))
        assert "".join(token["t"] for token in tokens) == whole["text"]
        assert [id for token in tokens for id in token["ids"]] == whole["tokens"]
        assert len(ends) == 1 and ends[0]["tokens_out"] == 480
        # A finished stream is available, too, from each of its events on.
        for at in dice.sample(range(len(tokens)), 20):
            events, _ = gone_on(client, name, str(at), 10**9)
            found = [json.loads(data) for e in events if (data := field(e, "data"))]
            later = [event for event in found if event["type"] == "token"]
            assert later == tokens[at + 1 :]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"n": 2}),
        ("/v1/completions", LONG | {"model": "m", "stream": True}),
        ("/v1/messages", {k: v for k, v in CHAT.items() if k != "ignore_eos"}),
        ("/v1/responses", {"model": "m", "input": "Tell a story.", "stream": True}),
        ("/completion", LONG | {"stream": True}),
        ("/api/chat", {"model": "m", "messages": CHAT["messages"]}),
    ],
)
def test_every_dialects_stream_is_resumed_by_bytes_and_by_ids(
    worker: WorkerProcess, path: str, body: Any
) -> None:
    name = f"talk/{new_job_id()}"
    dice = random.Random(7)
    with worker.client() as client:
        headers = {"X-Conversation-Id": name}
        whole = client.post(path, json=body, headers=headers).content
        assert b'"error":{' not in whole, whole
        url = f"/v1/stream?conv_id={name}"
        assert client.get(url).content == whole
        for at in [0, len(whole), *dice.sample(range(len(whole)), 20)]:
            assert client.get(f"{url}&from={at}").content == whole[at:]
        if path == "/api/chat":
            return  # lines of JSON have no ids
        events = whole.split(b"\n\n")[:-1]
        assert [field(event, "id") for event in events] == [str(i) for i in range(len(events))]
        for at in dice.sample(range(len(events)), min(20, len(events))):
            rest = client.get(url, headers={"Last-Event-ID": str(at)}).content
            assert rest == b"".join(event + b"\n\n" for event in events[at + 1 :])


def test_the_two_names_of_a_stream_may_be_equal(worker: WorkerProcess) -> None:
    name = new_job_id()
    with worker.client() as client:
        body = LONG | {"job_id": name, "max_tokens": 8}
        whole = client.post("/execute", json=body, headers={"X-Conversation-Id": name}).content
        assert b'"tokens_out":8' in whole, whole
        assert client.get(f"/execute/{name}").content == whole


def test_a_cut_conversation_is_looked_up_resumed_and_deleted(worker: WorkerProcess) -> None:
    name = new_job_id()
    with worker.client() as client:
        headers = {"X-Conversation-Id": f"{name}::m"}
        with client.stream("POST", "/v1/chat/completions", json=CHAT, headers=headers) as response:
            first = next(response.iter_raw())
        (found,) = client.post(
            "/v1/streams/lookup", json={"conversation_ids": [name, "unknown"]}
        ).json()
        assert found["conversation_id"] == f"{name}::m" and found["started_at"] > 0
        assert (found["completed_at"] > 0) == found["is_done"]
        rest = client.get(f"/v1/stream?conv_id={name}::m&from={len(first)}").content
        assert (first + rest).split(b"\n\n")[-2].startswith(b"data: [DONE]\n")
        (found,) = client.post("/v1/streams/lookup", json={"conversation_ids": [name]}).json()
        assert found["is_done"] and found["total_bytes"] == len(first + rest)
        assert client.delete(f"/v1/stream?conv_id={name}::m").status_code == 204
        assert client.delete(f"/v1/stream?conv_id={name}::m").status_code == 204
        assert client.get(f"/v1/stream?conv_id={name}::m").status_code == 404


def test_a_deletion_or_a_new_answer_cancels_the_kept_one(worker: WorkerProcess) -> None:
    path, cancelled = "/v1/chat/completions", 'worker_requests_total{outcome="cancelled"}'
    for how in ("delete", "again"):
        headers, name = {"X-Conversation-Id": how}, f"/v1/stream?conv_id={how}"
        before = worker.metric(cancelled)
        with worker.client() as client, ThreadPoolExecutor(1) as other:
            with holding(worker.hold):
                body = CHAT | {"max_tokens": 900}
                with client.stream("POST", path, json=body, headers=headers):
                    pass
                if how == "delete":
                    pending = other.submit(client.delete, name)
                else:
                    short = CHAT | {"max_tokens": 3}
                    pending = other.submit(client.post, path, json=short, headers=headers)
                worker.wait_metric(cancelled, before + 1)
            assert pending.result().is_success


def test_only_its_owner_may_read_a_stream(worker: WorkerProcess) -> None:
    mine, other = {"Authorization": "Bearer mine"}, {"x-api-key": "other"}
    name = {"X-Conversation-Id": "secret"}
    with worker.client() as client:
        body = CHAT | {"max_tokens": 8}
        whole = client.post("/v1/chat/completions", json=body, headers=mine | name).content
        url, lookup = "/v1/stream?conv_id=secret", {"conversation_ids": ["secret"]}
        for headers in (other, {}):
            assert client.get(url, headers=headers).status_code == 404
            assert client.post("/v1/streams/lookup", json=lookup, headers=headers).json() == []
            assert client.delete(url, headers=headers).status_code == 204
            another = client.post("/v1/chat/completions", json=body, headers=headers | name)
            assert another.status_code == 200
        assert client.get(url, headers=mine).content == whole, "and nobody has replaced it"
        assert client.get(url, headers={"x-api-key": "mine"}).content == whole


def test_head_does_not_wait_for_the_stream_and_comments_are_kept(scripted: ScriptedFactory) -> None:
    """Offsets count the bytes that a reader has seen, including comments."""
    worker = scripted(keepalive=0.05)
    worker.supervisor.script = [part for frame in story("a", "b") for part in (frame, 0.5)]
    with httpx.Client(base_url=worker.base_url) as client:
        with client.stream("POST", "/execute", json=JOB, headers=RESUME) as running:
            chunks = running.iter_raw()
            seen = next(chunks)
            head = httpx.head(f"{worker.base_url}/execute/j")
            assert head.status_code == 200 and not head.content
            assert head.headers["content-type"].startswith("text/event-stream")
            assert not worker.supervisor.jobs["j"].has_ended, "it has not waited for the end"
            seen += b"".join(chunks)
        assert seen.count(KEEPALIVE) >= 2
        assert client.get("/execute/j").content == seen


def test_an_unread_stream_is_cancelled_after_resume_seconds(scripted: ScriptedFactory) -> None:
    worker = scripted(resume_seconds=0.4)
    worker.supervisor.script = [*story("a")[:-1], 60.0]
    with httpx.Client(base_url=worker.base_url) as client:
        with client.stream("POST", "/execute", json=JOB, headers=RESUME):
            assert client.head("/execute/j").status_code == 200
        until(lambda: client.head("/execute/j").status_code == 404, lambda: "it is kept")
    assert worker.supervisor.cancelled == ["j"]


def test_resume_seconds_0_keeps_no_stream(scripted: ScriptedFactory) -> None:
    url = f"{scripted(resume_seconds=0).base_url}/execute"
    answer = httpx.post(url, json=JOB, headers=RESUME)
    assert answer.status_code == 200 and b"id: " not in answer.content
    assert httpx.get(f"{url}/j").status_code == 404


@pytest.mark.parametrize(
    ("url", "headers", "named"),
    [
        ("/v1/stream", {}, "conv_id"),
        ("/v1/stream?conv_id=here&from=-1", {}, "from"),
        ("/v1/stream?conv_id=here&from=99999999", {}, "from"),
        ("/v1/stream?conv_id=here", {"Last-Event-ID": "999999"}, "Last-Event-ID"),
        ("/v1/stream?conv_id=here", {"Last-Event-ID": "x"}, "Last-Event-ID"),
    ],
)
def test_an_invalid_position_is_refused_by_name(
    worker: WorkerProcess, url: str, headers: dict[str, str], named: str
) -> None:
    with worker.client() as client:
        body, name = CHAT | {"max_tokens": 2}, {"X-Conversation-Id": "here"}
        client.post("/v1/chat/completions", json=body, headers=name)
        answer = client.get(url, headers=headers)
        assert answer.status_code == 400 and named in answer.text


@pytest.mark.parametrize("place", ["", "?from=3", "?from=100000", "?from=x"])
def test_head_and_get_of_a_kept_stream_have_the_same_headers(
    scripted: ScriptedFactory, place: str
) -> None:
    url = f"{scripted().base_url}/execute"
    httpx.post(url, json=JOB, headers=RESUME)
    got, head = httpx.get(f"{url}/j{place}"), httpx.head(f"{url}/j{place}")
    assert head.status_code == got.status_code and not head.content
    own = {"date", "transfer-encoding", *(each.name.lower() for each in ECHOED_IDS)}
    found, expected = ({*each.headers.multi_items()} for each in (head, got))
    assert {key for key, _ in found ^ expected} <= own


def test_a_stream_with_a_late_head_is_kept_if_its_client_leaves_before_it(
    scripted: ScriptedFactory,
) -> None:
    worker, has_left = scripted(), threading.Event()
    worker.supervisor.script = [has_left, *story("a", "b")]
    url, headers = f"{worker.base_url}/execute", RESUME | {"x-llorch-late-head": "1"}
    with asking(worker.port, "/execute", JOB, headers):
        until(lambda: bool(worker.supervisor.requests), lambda: "it has not come")
    has_left.set()
    until(lambda: httpx.get(f"{url}/j").status_code == 200, lambda: "it was not kept")
    events = httpx.get(f"{url}/j").text.split("\n\n")
    assert [field(event.encode(), "event") for event in events[:-1]] == [
        *("started", "token", "token", "end")
    ]
