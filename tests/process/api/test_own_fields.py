"""Fields that every dialect has: the request's adapters, and which prefixes it may reuse."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.worker import WorkerProcess
from worker.api import app
from worker.api.chat.operations import STREAMING

TEXT = "Once upon a time there was a fox who lived in the wood and ate what it found there. " * 4
CHAT = {"messages": [{"role": "user", "content": TEXT}], "model": "tiny-model"}
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"max_tokens": 1},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1},
    "/v1/messages": CHAT | {"max_tokens": 1},
    "/api/chat": CHAT | {"stream": False, "options": {"num_predict": 1}},
    "/api/generate": {
        **{"model": "tiny-model", "prompt": TEXT, "raw": True, "stream": False},
        "options": {"num_predict": 1},
    },
    "/completion": {"prompt": TEXT, "n_predict": 1},
    "/v1/inference": {"prompt": TEXT, "max_tokens": 1},
}


def test_each_dialect_that_generates_has_an_example() -> None:
    for dialect in app.DIALECTS:
        paths = {each.path for each in dialect.operations if STREAMING == each.reads}
        assert not paths or paths & DIALECTS.keys(), f"DIALECTS has a body for none of {paths}"


@pytest.mark.parametrize("path", DIALECTS)
def test_a_request_chooses_which_prefixes_it_reuses(worker: WorkerProcess, path: str) -> None:
    def n_cached(**fields: Any) -> int:
        answer = worker.post(path, DIALECTS[path] | fields)
        assert answer.status_code == 200, answer.text
        assert "x-ignored-fields" not in answer.headers, answer.headers["x-ignored-fields"]
        return int(worker.logs("request.ended")[-1]["cached_tokens"])

    salts = [f"{path} {name}" for name in "ab"]
    assert n_cached(cache_salt=salts[0]) == 0
    assert n_cached(cache_salt=salts[1]) == 0, "another's"
    assert n_cached(cache_salt=salts[0]) > 20
    assert n_cached(cache_salt=salts[0], deterministic=True) == 0
    if path != "/v1/inference":
        for other in ({"cache_prompt": False}, {"user": path}, {"prompt_cache_key": path}):
            assert n_cached(cache_salt=salts[0], **other) == 0, other


@pytest.mark.parametrize("path", DIALECTS)
def test_an_unknown_adapter_is_named(worker: WorkerProcess, path: str) -> None:
    answer = worker.post(path, DIALECTS[path] | {"lora": [{"id": 3, "scale": 1}]})
    assert answer.status_code == 400 and "lora[0].id" in answer.text
