"""How much a model reasons, in every dialect.

The bundled model thinks forever if its end is forbidden, so only a budget ends it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import DATA
from tests.conftest import StartWorker
from tests.support.bundled import bundled_with_template
from tests.support.held import holding
from tests.support.worker import WorkerProcess
from tools.survival import EXACT

STORY: Any = [{"role": "user", "content": "Tell a story."}]
OPTIONS = {"num_predict": 40, "temperature": 0, "ignore_eos": True}
BODY: Any = {"model": "m", "messages": STORY, "max_tokens": 48, "temperature": 0}
BODY |= {"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": True}}


def chunks_of(lines: Iterable[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def message_of(worker: WorkerProcess, **fields: Any) -> tuple[str, str]:
    """Return the reasoning and the text of an answer."""
    message = worker.answer("/v1/chat/completions", BODY | fields)["choices"][0]["message"]
    return message.get("reasoning_content", ""), message["content"]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = (DATA / "templates" / "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja").read_text()
    return bundled_with_template(tmp_path_factory.mktemp("thinker") / "m.gguf", template)


@pytest.fixture(scope="module")
def thinking(thinker: Path, share_worker: StartWorker) -> WorkerProcess:
    """A worker without reasoning settings, which the tests share."""
    flags = ("--model", str(thinker), "--context-length", "8192", *EXACT)
    return share_worker(*flags, can_be_held=True)


def test_reasoning_is_bounded_or_off_by_each_dialects_own_field(thinking: WorkerProcess) -> None:
    worker = thinking

    def tokens(thought: str) -> int:
        return len(worker.post("/tokenize", {"content": thought}).json()["tokens"])

    for name in ("reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget"):
        thought, _ = message_of(worker, **{name: 5})
        assert 0 < tokens(thought) <= 6, name

    claude = {"model": "m", "messages": STORY, "max_tokens": 40, "temperature": 0}

    def blocks(**thinking: Any) -> dict[str, str]:
        content = worker.answer("/v1/messages", claude | {"thinking": thinking})["content"]
        return {block["type"]: block.get("thinking", block.get("text")) for block in content}

    assert 0 < tokens(blocks(type="enabled", budget_tokens=4)["thinking"]) <= 5
    for off in ("disabled", "between_tools"):
        assert "thinking" not in blocks(type=off), off

    ollama = {"model": "m", "messages": STORY, "stream": False, "options": OPTIONS}
    assert worker.post("/api/chat", ollama).json()["message"]["thinking"]
    silent = worker.post("/api/chat", ollama | {"think": False}).json()["message"]
    assert not silent.get("thinking") and silent["content"]
    for level in ("low", "medium", "high", "max"):
        assert worker.answer("/api/chat", ollama | {"think": level})["message"]["thinking"], level

    response = {"model": "m", "input": "Tell a story.", "max_output_tokens": 30, "temperature": 0}
    response["ignore_eos"] = True  # otherwise it may say nothing
    kinds = [
        [item["type"] for item in worker.post("/v1/responses", response | more).json()["output"]]
        for more in ({}, {"reasoning": {"effort": "none"}})
    ]
    assert kinds[0][0] == "reasoning" and kinds[1] == ["message"]

    prompt = worker.post("/apply-template", {"messages": STORY}).json()["prompt"]
    raw = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    free = worker.post("/v1/inference", raw).json()
    bounded = worker.post("/v1/inference", raw | {"reasoning_budget": 2}).json()
    assert bounded["tokens"][:2] == free["tokens"][:2]
    assert "</think>" in bounded["text"] and "</think>" not in free["text"]


def test_the_operators_budget_and_message_hold_unless_a_request_has_its_own(
    start_worker: StartWorker, thinker: Path
) -> None:
    variables = '{"enable_thinking": true, "greeting": "Hi"}'
    worker = start_worker(
        *("--model", str(thinker), "--reasoning-budget", "6"),
        *("--reasoning-budget-message", " Enough.", "--chat-template-kwargs", variables),
    )
    thought, text = message_of(worker)
    assert thought.endswith(" Enough.") and text
    longer, _ = message_of(worker, reasoning_budget=12, reasoning_budget_message="")
    assert len(longer) > len(thought) - len(" Enough.") and not longer.endswith("Enough.")
    assert message_of(worker, reasoning_budget=-1)[1] == ""
    # A response's items may be sent back, as in OpenAI's documentation.
    body = {"input": STORY, "max_output_tokens": 60, "temperature": 0, "ignore_eos": True}
    output = worker.post("/v1/responses", body).json()["output"]
    assert output[0]["type"] == "reasoning" and output[0]["content"]
    turns = body | {"input": [*STORY, *output, {"role": "user", "content": "Go on."}]}
    assert worker.answer("/v1/responses", turns)["output"]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_crash_does_not_change_the_end_of_reasoning(
    thinking: WorkerProcess, is_ordered: bool
) -> None:
    """With a budget of its own, or closed on command just before.

    The engine is held where it dies, because the batch that the next one computes, and thus its
    rounding, would otherwise depend on how far this one came.
    """
    worker = thinking
    n_ready = len(worker.logs("engine.ready"))
    message = " That is enough."
    body = BODY | {"stream": True, "max_tokens": 8000, "reasoning_budget_message": message}
    if not is_ordered:
        body |= {"reasoning_budget": 120, "max_tokens": 180}
    whole = "" if is_ordered else worker.post("/v1/chat/completions", body).text
    text, thought, is_killed = "", "", False
    with (
        holding(worker.hold),
        worker.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        for chunk in chunks_of(response.iter_lines()):
            delta = chunk["choices"][0]["delta"]
            thought += delta.get("reasoning_content") or ""
            text += delta.get("content") or ""
            if not is_killed and len(thought) > 10:
                is_killed = True
                if is_ordered:
                    order = {"id": chunk["id"], "action": "reasoning_end"}
                    answer = worker.post("/v1/chat/completions/control", order)
                    assert answer.json() == {"success": True}
                worker.kill_engine()
                worker.hold.unlink()
            if is_ordered and text:
                break
    assert is_killed and text and thought.endswith(message) and thought.count(message) == 1
    # The text may already have been sent; the next test must not meet the dead engine.
    worker.wait_log("engine.ready", n_ready + 1)
    if not is_ordered:
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks_of(whole.splitlines())]
        assert thought == "".join(d.get("reasoning_content") or "" for d in deltas)
        assert text[:40] == "".join(d.get("content") or "" for d in deltas)[:40]


def test_a_control_command_without_a_target_reports_no_success(thinking: WorkerProcess) -> None:
    control = "/v1/chat/completions/control"
    gone = thinking.post(control, {"id": "x", "action": "reasoning_end"}).json()
    assert gone["success"] is False and "no active completion" in gone["message"]
    for wrong in ({"action": "reasoning_end"}, {"id": "x", "action": "stop"}):
        assert thinking.post(control, wrong).status_code == 400
