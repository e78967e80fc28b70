"""llama-server's chat page with a real worker behind it, in a real browser; `make page-test`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.conftest import StartWorker
from tests.process.api.test_reasoning_budget import thinker
from tests.support.worker import WorkerProcess
from tests.system.page.chatting import Chat
from tests.system.page.mcp_server import running_mcp
from tests.system.page.watching import expect, own_hosts, violations

pytestmark = pytest.mark.long
__all__ = ["thinker"]
TOKEN = "correct-horse-battery"
FRANCE = "What is the capital of France?"
RICH = (
    "Code:\n\n```python\nprint(1 + 1)\n```\n\nA formula: $$x^2 + y^2 = z^2$$\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |"
)
HOSTILE = (
    "<script>window.hurt=1</script><img src=x onerror='window.hurt=2'>\n\n"
    "[click](javascript:window.hurt=3)\n\n![p](https://example.com/p.png)\n\n"
    "<iframe src='https://example.com'></iframe>\n\n**bold**"
)


def writes(text: str) -> dict[str, Any]:
    """Return settings with which the model writes exactly this text."""
    return {"customJson": json.dumps({"guided_choice": [text]})}


def test_ten_turns_are_kept_over_a_reload(tab: Any, worker: WorkerProcess) -> None:
    chat = Chat(tab, worker.base_url)
    assert "Paris" in chat.ask(FRANCE)
    for n in range(2, 11):
        chat.ask(f"What is {n} plus {n}?")
    expect(chat.answers).to_have_count(10)
    tab.reload()
    assert re.search(r"\d+ tokens", chat.complete())
    expect(tab.get_by_text("What is 10 plus 10?")).to_be_visible()
    tab.mouse.move(640, 300)
    for _ in range(20):  # messages far above are rendered only when scrolled to
        tab.mouse.wheel(0, -2000)
        tab.wait_for_timeout(50)
    expect(chat.answers.first).to_contain_text("Paris")


def test_stop_ends_the_request(tab: Any, worker: WorkerProcess) -> None:
    cancelled = 'worker_requests_total{outcome="cancelled"}'
    before = worker.metric(cancelled)
    chat = Chat(tab, worker.base_url, customJson='{"ignore_eos": true, "max_tokens": 900}')
    with chat.in_mid_answer("Tell me a story.", worker):
        chat.stop.click()
    worker.wait_idle()
    assert worker.metric(cancelled) == before + 1
    expect(chat.box).to_be_editable()


def test_a_reload_in_mid_answer_loses_nothing(tab: Any, worker: WorkerProcess) -> None:
    """The page finds the stream that continued without it, and reads it from the beginning."""
    success = 'worker_requests_total{outcome="success"}'
    before = worker.metric(success)
    chat = Chat(tab, worker.base_url, customJson='{"ignore_eos": true, "max_tokens": 600}')
    with chat.in_mid_answer("Tell me a story.", worker):
        tab.reload()
        expect(tab.get_by_label("User message with actions")).to_contain_text("Tell me a story.")
        expect(chat.answers.last).to_contain_text(re.compile(r"\w+ \w+ \w+"))
    assert "600 tokens" in chat.complete()
    assert worker.metric(success) == before + 1


def test_code_formulas_and_tables_are_rendered(tab: Any, worker: WorkerProcess) -> None:
    chat = Chat(tab, worker.base_url, **writes(RICH))
    chat.ask("Write.")
    last = chat.answers.last
    expect(last.locator("pre code.hljs")).to_contain_text("print(1 + 1)")
    expect(last.locator(".katex")).to_be_visible()
    expect(last.locator("table td").first).to_have_text("1")


def test_reasoning_is_shown_apart_from_the_answer(tab: Any, worker: WorkerProcess) -> None:
    chat = Chat(tab, worker.base_url, **writes("<think>\nFrance. Oslo?\n</think>\n\nParis."))
    answer = chat.ask(FRANCE)
    assert "Paris." in answer and "think>" not in answer and "Oslo" not in answer
    chat.answers.last.get_by_role("button", name="Reasoning").click()
    expect(chat.answers.last).to_contain_text("France. Oslo?")


def test_reasoning_is_ended_by_a_click(tab: Any, start_worker: StartWorker, thinker: Path) -> None:
    """For a model that would think forever."""
    running = start_worker("--model", str(thinker), "--context-length", "8192")
    chat = Chat(tab, running.base_url, customJson='{"ignore_eos": true, "max_tokens": 8000}')
    chat.send("Tell me a story.")
    tab.get_by_role("button", name="Skip reasoning").click()
    expect(tab.get_by_role("button", name="Skip reasoning")).to_have_count(0)
    expect(tab.get_by_text("Reasoning", exact=True)).to_be_visible()
    chat.stop.click()


def test_reasoning_that_was_cut_off_goes_on(
    tab: Any, start_worker: StartWorker, thinker: Path
) -> None:
    running = start_worker("--model", str(thinker), "--context-length", "8192")
    few = '{"ignore_eos": true, "max_tokens": 16}'

    def shown() -> str:
        """Return the shown reasoning, which is before the model's name."""
        text: str = chat.answers.last.inner_text()
        return text.partition("Toggle content")[2].rpartition("\n\nm\n")[0].strip()

    chat = Chat(tab, running.base_url, customJson=few, enableContinueGeneration=True)
    chat.ask("Tell me a story.")
    chat.answers.last.get_by_role("button", name="Reasoning").click()
    thought = shown()
    chat.answers.last.get_by_role("button", name="Continue").click()
    chat.complete()
    assert thought and shown().startswith(thought) and len(shown()) > len(thought) + 8


def test_what_only_llama_server_has_is_hidden(tab: Any, worker: WorkerProcess) -> None:
    """Server-side tools, and the models of a router."""
    chat = Chat(tab, worker.base_url)
    expect(chat.box).to_be_visible()
    tab.get_by_role("button", name="Settings", exact=True).first.click()
    tab.get_by_text("Tools", exact=True).first.click()
    expect(tab.get_by_text(re.compile("browser", re.I)).first).to_be_visible()
    expect(tab.get_by_text(re.compile("server tools|built-in|failed", re.I))).to_have_count(0)


def test_a_hostile_answer_is_harmless(tab: Any, worker: WorkerProcess) -> None:
    hosts = own_hosts(tab)
    chat = Chat(tab, worker.base_url, **writes(HOSTILE))
    chat.ask("Hurt me.")
    tab.wait_for_timeout(500)
    assert tab.evaluate("window.hurt") is None
    last = chat.answers.last
    assert last.locator("iframe, script").count() == 0
    assert last.locator("[onerror]").count() == 0
    last.get_by_text("click").click()  # the page's policy does not run such a link
    tab.wait_for_timeout(500)
    assert tab.evaluate("window.hurt") is None
    assert loaded_elsewhere(hosts, worker) == set()


def loaded_elsewhere(hosts: list[str], worker: WorkerProcess) -> set[str]:
    """Return hosts other than the worker and the page itself (`data:`, `blob:`)."""
    return {host for host in hosts if host} - {worker.base_url.removeprefix("http://")}


def test_it_asks_no_other_host(tab: Any, worker: WorkerProcess) -> None:
    hosts = own_hosts(tab)
    blocked: list[str] = []
    tab.on(
        "console",
        lambda m: blocked.append(m.text) if "Content Security Policy" in m.text else None,
    )
    chat = Chat(tab, worker.base_url)
    chat.ask(FRANCE)
    for name in ("Settings", "Search"):
        tab.get_by_role("button", name=name, exact=True).first.click()
        tab.wait_for_timeout(500)
        tab.keyboard.press("Escape")
    assert loaded_elsewhere(hosts, worker) == set() and blocked == []


def test_the_token_is_asked_for_and_used(tab: Any, start_worker: StartWorker) -> None:
    running = start_worker(env={"LLORCH_WORKER_TOKEN": TOKEN})
    chat = Chat(tab, running.base_url)
    tab.get_by_role("button", name="Enter API Key").click()
    field = tab.get_by_label("API Key")
    field.fill("wrong")
    tab.keyboard.press("Enter")
    expect(tab.get_by_text("Invalid API key")).to_be_visible()
    field.fill(TOKEN)
    tab.keyboard.press("Enter")
    expect(chat.box).to_be_visible()
    assert "Paris" in chat.ask(FRANCE)


def test_a_served_name_is_the_one_that_it_sends(tab: Any, start_worker: StartWorker) -> None:
    running = start_worker("--served-model-name", "my-model")
    chat = Chat(tab, running.base_url)
    assert "my-model" in chat.ask(FRANCE) and "Paris" in chat.answers.last.inner_text()


def test_both_pages_live_below_a_prefix(tab: Any, start_worker: StartWorker) -> None:
    running = start_worker("--api-prefix", "/llm/v2", wait_ready=False)
    answers: list[tuple[str, int]] = []
    tab.on("response", lambda each: answers.append((urlsplit(each.url).path, each.status)))
    running.wait_log("worker.ready")
    chat = Chat(tab, f"{running.base_url}/llm/v2")
    assert "Paris" in chat.ask(FRANCE)
    tab.goto(f"{running.base_url}/llm/v2/")
    tab.get_by_role("link", name="API").click()
    expect(tab.locator("#operations")).to_contain_text("POST /execute")
    tab.get_by_role("link", name="Status").click()
    tab.get_by_role("link", name="Chat").click()
    expect(tab.get_by_text(FRANCE).first).to_be_attached()
    assert [path for path, status in answers if status >= 400 or "/llm/v2/" not in path] == []


def test_the_worker_may_go_and_come_back(tab: Any, start_worker: StartWorker) -> None:
    """The page is cached for offline use, but not the worker's data."""
    running = start_worker()
    chat = Chat(tab, running.base_url)
    assert "Paris" in chat.ask(FRANCE)
    tab.wait_for_function("navigator.serviceWorker.ready.then((each) => !!each.active)")
    running.kill()
    chat.send("Are you there?")
    expect(tab.get_by_text(re.compile("unable to connect", re.I)).first).to_be_visible()
    tab.keyboard.press("Escape")
    tab.reload()
    expect(tab.get_by_text(FRANCE).first).to_be_attached()
    running = start_worker("--port", str(running.port))
    tab.reload()
    expect(chat.answers.last).to_be_visible()
    tab.wait_for_timeout(1000)  # until the whole conversation is rendered
    assert "Paris" in chat.ask(FRANCE)


UPSTREAM = {"color-contrast", "nested-interactive", "page-has-heading-one"}
"""Known findings of axe in llama-server's page, which is served unchanged."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_that_is_not_the_pages_own(
    browser: Any, worker: WorkerProcess, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    chat = Chat(context.new_page(), worker.base_url)
    chat.ask(FRANCE)
    assert {each.partition(":")[0] for each in violations(chat.page)} <= UPSTREAM
    context.close()


def test_a_tool_of_an_mcp_server_is_called(tab: Any, worker: WorkerProcess) -> None:
    """A server on this machine, as the page's policy allows; the user is asked first."""
    with running_mcp("sunny, 21 degrees") as (url, calls):
        servers = [{"id": "t", "name": "test", "url": url, "enabled": True}]
        chat = Chat(
            tab,
            worker.base_url,
            mcpServers=json.dumps(servers),
            agenticMaxTurns=1,
            customJson=json.dumps({"tool_choice": "required", "max_tokens": 60}),
        )
        expect(chat.box).to_be_visible()
        chat.send("What is the weather in Paris?")
        tab.get_by_role("button", name="Allow once").click()
        expect(tab.get_by_text("Agentic turn limit reached")).to_be_visible()
        assert len(calls) == 1
        tab.get_by_role("button", name="weather").first.click()
        expect(tab.get_by_text("sunny, 21 degrees").first).to_be_visible()
