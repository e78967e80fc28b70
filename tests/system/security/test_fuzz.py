"""Random request bodies: each gets an answer or a clear refusal."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.process.api.test_openapi import GOOD, conforms
from tests.support.worker import WorkerProcess
from tests.unit.engine.test_template_fuzz import ANYTHING, NO_CHECKS, n_cases

FIELDS = (
    "messages prompt input model max_tokens temperature top_p top_k min_p seed stop stream n "
    "tools tool_choice response_format logit_bias logprobs top_logprobs echo suffix job_id "
    "grammar guided_json guided_regex reasoning_effort stream_options chat_template_kwargs "
    "metadata content tokens system thinking instructions text presence_penalty min_tokens"
).split()


@st.composite
def bodies(draw: Any) -> tuple[str, Any]:
    """Draw a path and a modified body for it."""
    path = draw(st.sampled_from(sorted(GOOD)))
    body: Any = deepcopy(GOOD[path])
    if "job_id" in body:
        body["job_id"] = draw(st.uuids().map(str))
    for _ in range(draw(st.integers(1, 3))):
        place: Any = body
        while draw(st.booleans()):
            inner = list(place.values()) if isinstance(place, dict) else place
            nested = [each for each in inner if isinstance(each, (dict, list)) and each]
            if not nested:
                break
            place = draw(st.sampled_from(nested))
        if isinstance(place, list):
            place[draw(st.integers(0, len(place) - 1))] = draw(ANYTHING)
        else:
            names = st.sampled_from(sorted(place)) if place else st.nothing()
            place[draw(names | st.sampled_from(FIELDS))] = draw(ANYTHING)
    return path, body


def post_bodies(worker: WorkerProcess, n_cases: int) -> dict[int, int]:
    """Return the number of each status; checks each answer against `/openapi.json`."""
    engine, counts = worker.engine_pid, Counter[int]()
    document = worker.get("/openapi.json").json()
    with worker.client() as client:

        @settings(max_examples=n_cases, deadline=None, suppress_health_check=NO_CHECKS)
        @given(made_up=bodies())
        def post(made_up: tuple[str, Any]) -> None:
            path, body = made_up
            if isinstance(body, dict) and "max_tokens" not in body:
                body["max_tokens"] = 2  # an answer of a thousand tokens shows nothing more
            sent = json.dumps(body).encode()
            headers = {"Content-Type": "application/json"}
            answer = client.post(path, content=sent, headers=headers)
            counts[answer.status_code] += 1
            assert answer.status_code < 500, (path, body)
            conforms(document, path, answer)

        post()
    assert worker.engine_pid == engine and not worker.logs("engine.crashed")
    assert not worker.logs("request.broken") and worker.is_ready()
    return dict(sorted(counts.items()))


@n_cases
def test_made_up_bodies(worker: WorkerProcess, n_cases: int) -> None:
    counts = post_bodies(worker, n_cases)
    print("statuses:", counts)
    assert counts.get(200) and counts.get(400)
