"""Chat templates of model files in a started worker: odd, missing, endless, hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartWorker
from tests.support.bundled import ASSET, bundled_with, bundled_with_template
from tests.support.worker import WorkerProcess

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
OWN = json.loads((ASSET / "tokenizer_config.json").read_text())["chat_template"]
# BOS, which the model also wants from us; and two ways to fail, by a word in the chat.
ODD = """{{ bos_token }}{% if messages[0].content == 'never end' %}
{%- for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- elif messages[0].content == 'refuse' %}{{ raise_exception('roles must alternate') }}
{%- endif %}"""
ODD += OWN


def greedy(worker: WorkerProcess, content: str) -> Any:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
    return worker.post("/v1/chat/completions", body).json()


def test_a_model_without_a_template_refuses_chats(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = start_worker("--model", str(bundled_with_template(tmp_path / "bare.gguf", None)))
    assert worker.get("/info").json()["model"]["has_chat_template"] is False
    chat = worker.post("/v1/chat/completions", {"messages": FRANCE})
    assert chat.status_code == 400
    assert chat.json()["error"]["param"] == "messages"
    assert "chat template" in chat.json()["error"]["message"]
    applied = worker.post("/apply-template", {"messages": FRANCE})
    assert applied.status_code == 400 and applied.json()["error"]["param"] == "messages"
    assert worker.execute("Once upon a time", max_tokens=4, temperature=0).text == ", there was a"


# An operator's template, with a role of its own, that prints variables.
NAMES = ("reasoning_effort", "enable_thinking", "verbosity", "thinking_budget")
OPERATORS = """{% for m in messages if m.role == 'critic' %}{{ m.content }}{% else %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %} {{ date_string | length }} """
OPERATORS += "".join(f"{{{{ {name} }}}}," for name in NAMES) + "{% endfor %}"
SECOND = OWN + "{# for chats with tools #}"


@pytest.fixture(scope="module")
def two_templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an odd template, and a second one for chats with tools."""
    changes: dict[str, str | int | None] = {"tokenizer.chat_template": ODD}
    changes |= {"tokenizer.chat_template.tool_use": SECOND}
    return bundled_with(tmp_path_factory.mktemp("two") / "two.gguf", changes)


@pytest.fixture(scope="module")
def odd(share_worker: StartWorker, two_templates: Path) -> WorkerProcess:
    return share_worker("--model", str(two_templates))


@pytest.fixture(scope="module")
def replaced(share_worker: StartWorker, two_templates: Path) -> WorkerProcess:
    """That model with an operator's template."""
    file = two_templates.with_name("own.jinja")
    file.write_text(OPERATORS)
    return share_worker("--model", str(two_templates), "--chat-template", str(file))


def test_a_templates_bos_is_not_doubled_and_its_failures_are_reported(
    odd: WorkerProcess, worker: WorkerProcess
) -> None:
    usual = greedy(worker, FRANCE[0]["content"])
    answer = greedy(odd, FRANCE[0]["content"])
    assert answer["usage"]["prompt_tokens"] == usual["usage"]["prompt_tokens"]
    assert answer["choices"][0]["message"]["content"].endswith("Paris.")
    assert "roles must alternate" in str(greedy(odd, "refuse")["error"])
    assert "did not end" in str(greedy(odd, "never end")["error"])
    assert odd.is_ready() and not odd.logs("engine.crashed")


def templates_of(worker: WorkerProcess) -> tuple[str, str | None, bool]:
    """Return the template, the one for tools, and whether the model's metadata has the latter."""
    props, info = worker.get("/props").json(), worker.get("/info").json()
    has_second = "tokenizer.chat_template.tool_use" in info["model"]["metadata"]
    return props["chat_template"], props.get("chat_template_tool_use"), has_second


def test_props_has_both_templates_of_a_model(odd: WorkerProcess) -> None:
    assert templates_of(odd) == (ODD, SECOND, True)


def test_an_operators_template_replaces_both(replaced: WorkerProcess) -> None:
    assert templates_of(replaced) == (OPERATORS, None, False)


def test_a_role_that_only_the_template_knows_is_accepted(replaced: WorkerProcess) -> None:
    body = {"messages": [{"role": "developer", "content": "Be kind."}, {"role": "assistant"}]}
    prompt = replaced.post("/apply-template", body).json()["prompt"]
    assert prompt == "[system]Be kind.[assistant] 11 ,,,,"
    body = {"messages": [{"role": "critic", "content": "Be kind."}]}
    assert replaced.post("/apply-template", body).json()["prompt"] == "Be kind."


def test_apply_template_and_tokenize_render_a_chat_with_all_its_fields(
    replaced: WorkerProcess,
) -> None:
    """Clients that count tokens or use raw completions get a chat's prompt here."""
    worker = replaced
    for fields, prompt in (
        ({}, ",,,,"),
        ({"reasoning_effort": "high"}, "high,True,,,"),
        ({"enable_thinking": False, "verbosity": "low"}, ",False,low,0,"),
        ({"reasoning_budget_tokens": 0}, ",False,,0,"),
        ({"thinking_budget_tokens": 9}, ",True,,9,"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"verbosity": "high"}},
            "low,True,high,,",
        ),
        ({"verbosity": "low", "chat_template_kwargs": {"verbosity": "high"}}, ",,low,,"),
    ):
        body = {"messages": FRANCE, **fields}
        shown = worker.post("/apply-template", body)
        assert shown.json()["prompt"].rpartition(" ")[2] == prompt
        assert "x-ignored-fields" not in shown.headers
        tokens = worker.post("/tokenize", body)
        counted = worker.post("/v1/chat/completions/input_tokens", body).json()["input_tokens"]
        assert tokens.json()["count"] == counted and "x-ignored-fields" not in tokens.headers
