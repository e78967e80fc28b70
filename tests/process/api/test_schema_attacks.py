"""Schemas, grammars and sampling against a started worker: nothing ends its engine, and every
request gets its answer or a 400."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.worker import WorkerProcess
from tests.unit.api.test_hostile_schemas import HOSTILE
from tests.unit.api.test_structured import SCHEMAS

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def form(schema: Any, **fields: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": FRANCE, "max_tokens": 4, "response_format": wanted, **fields}


def test_hostile_schemas_hold_nobody_up(worker: WorkerProcess) -> None:
    engine_pid, delays, done = worker.engine_pid, [], threading.Event()

    def watch() -> None:
        with worker.client() as client:
            while not done.wait(0.01):
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                delays.append(time.monotonic() - began)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            bodies = [form(schema) for schema in HOSTILE.values()]
            answers = list(pool.map(lambda body: worker.post("/v1/chat/completions", body), bodies))
    finally:
        done.set()
        watcher.join()
    assert {answer.status_code for answer in answers} <= {200, 400}
    for answer in answers:
        if answer.status_code == 400:
            field = answer.json()["error"]["param"]
            assert field == "body" or field.startswith("response_format.json_schema.schema")
    assert worker.engine_pid == engine_pid and not worker.logs("engine.crashed")
    # A millisecond on an idle machine; no schema takes longer than this on a busy one.
    assert sorted(delays)[len(delays) * 95 // 100] < 0.6, sorted(delays)


@pytest.mark.parametrize(
    "fields",
    [
        {"ignore_eos": True},
        {"temperature": 1e-39},
        {"temperature": 1e-39, "ignore_eos": True},
        {"top_k": 1, "min_p": 1, "top_p": 0},
        {"logit_bias": {str(token): -100 for token in range(300)}},
        {"logit_bias": {str(token): 100 for token in range(300)}, "temperature": 2},
        {"frequency_penalty": -2, "presence_penalty": -2, "repetition_penalty": 0},
        {"stop": ["yes"]},
    ],
    ids=str,
)
def test_no_sampling_breaks_a_constraint(worker: WorkerProcess, fields: dict[str, Any]) -> None:
    engine_pid = worker.engine_pid
    body = form({"enum": ["yes!", "no!"]}, **(fields | {"max_tokens": 50}))
    for _ in range(3):
        (choice,) = worker.post("/v1/chat/completions", body).json()["choices"]
        text = choice["message"]["content"]
        assert text in ('"yes!"', '"no!"') or (fields.get("stop") and text in ('"', '"no!"'))
        grammar = {"messages": FRANCE, "grammar": 'root ::= "a" [bc] "d"?', **fields}
        (choice,) = worker.post("/v1/chat/completions", grammar).json()["choices"]
        assert choice["message"]["content"] in ("ab", "ac", "abd", "acd")
    assert worker.engine_pid == engine_pid


def test_what_is_not_enforced_is_named_in_a_header(worker: WorkerProcess) -> None:
    answer = worker.post("/v1/chat/completions", form({"type": "array", "uniqueItems": True}))
    path = "response_format.json_schema.schema.uniqueItems"
    assert answer.status_code == 200 and path in answer.headers["x-ignored-fields"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["a", "#", "object", "^"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("a"), inner, max_size=1),
    max_leaves=3,
)
KEYWORDS = st.sampled_from(
    "type enum const anyOf oneOf allOf not if $ref $defs properties required items prefixItems "
    "additionalProperties patternProperties minLength pattern format minimum multipleOf "
    "maxItems uniqueItems nullable propertyNames".split()
)


@st.composite
def damaged(draw: Any) -> Any:
    """A schema with a keyword somewhere that has a value of any kind."""
    schema = deepcopy(draw(SCHEMAS))
    place = schema
    while isinstance(place, dict) and place and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(place)))
        place = place[name][0] if isinstance(place[name], list) and place[name] else place[name]
    if isinstance(place, dict):
        place[draw(KEYWORDS)] = draw(JSON)
    return schema


def fuzz(worker: WorkerProcess, n_cases: int) -> dict[int, int]:
    """How many requests with made-up schemas got which status."""
    engine_pid, counts = worker.engine_pid, dict[int, int]()
    with worker.client() as client:

        @settings(max_examples=n_cases, deadline=None, suppress_health_check=list(HealthCheck))
        @given(schema=SCHEMAS | damaged(), as_tool=st.booleans(), seed=st.integers(0, 99))
        def post(schema: Any, as_tool: bool, seed: int) -> None:
            body = form(schema, seed=seed)
            if as_tool:
                function = {"name": "f", "parameters": schema}
                tools = [{"type": "function", "function": function}]
                body = {"messages": FRANCE, "max_tokens": 4, "tools": tools, "seed": seed}
                body["tool_choice"] = "required"
            status = _status(client, body)
            counts[status] = counts.get(status, 0) + 1
            assert status in (200, 400), schema

        post()
    assert worker.engine_pid == engine_pid and not worker.logs("engine.crashed")
    return counts


def _status(client: httpx.Client, body: Any) -> int:
    return client.post("/v1/chat/completions", content=json.dumps(body), headers=_JSON).status_code


_JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("n_cases", [100, pytest.param(10_000, marks=pytest.mark.long)])
def test_made_up_schemas_get_an_answer_or_a_400(worker: WorkerProcess, n_cases: int) -> None:
    counts = fuzz(worker, n_cases)
    print("statuses:", counts)
    assert counts.get(200) and counts.get(400)
