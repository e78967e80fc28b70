"""Schemas, grammars and sampling against a started worker: nothing ends its engine, and every
request gets its answer or a 400."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.worker import WorkerProcess
from tests.unit.api.test_structured import SCHEMAS

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def form(schema: Any, **fields: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": FRANCE, "max_tokens": 4, "response_format": wanted, **fields}


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
