"""A fleet of two groups in the browser: the gateway serves the pages for all its workers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import StartWorker
from tests.support.gateway import gateway_before, served, token_of
from tests.support.worker import WorkerProcess
from tests.system.page.chatting import Chat
from tests.system.page.watching import expect, faults_of, own_hosts, violations

pytestmark = pytest.mark.long
GROUPS = {"north": 2, "south": 1}
FOX = "Once upon a time, there was a brave fox named"
FRANCE = "What is the capital of France?"


@pytest.fixture(scope="module")
def workers(share_worker: StartWorker) -> dict[str, list[WorkerProcess]]:
    def started(group: str, n: int) -> WorkerProcess:
        env = {"LLORCH_WORKER_TOKEN": token_of(f"{group}-{n}")}
        return share_worker("--slots", "4", "--served-model-name", group, env=env)

    return {group: [started(group, n) for n in range(count)] for group, count in GROUPS.items()}


@pytest.fixture(scope="module")
def fleet(workers: dict[str, list[WorkerProcess]]) -> Iterator[str]:
    with served(gateway_before(workers)) as address:
        yield address


def test_the_status_page_shows_all_workers_and_each(tab: Any, fleet: str) -> None:
    faults, hosts = faults_of(tab), own_hosts(tab)
    tab.goto(fleet)
    table = tab.get_by_role("region", name="Table of workers")
    for group, count in GROUPS.items():
        expect(table).to_contain_text(f"{group}: {count} of {count} well, 0 running")
    for id in ("south-0", "north-1", "north-0"):
        chosen = tab.get_by_role("button", name=id)
        chosen.focus()
        tab.keyboard.press("Enter")
        expect(chosen).to_have_attribute("aria-pressed", "true")
        expect(tab.locator("#serves")).to_be_visible()
        expect(tab.locator("#state .dot")).to_have_class("dot ready")
        link = tab.locator("#chat-link")
        expect(link).to_have_attribute("href", f"chat/?model={id.partition('-')[0]}")
        tab.wait_for_timeout(2500)
        expect(chosen).to_be_focused()  # the table is not redrawn
    assert faults == [] and {host for host in hosts if host} == {fleet.removeprefix("http://")}
    assert violations(tab) == []


def test_a_job_is_seen_at_its_worker(
    tab: Any, fleet: str, workers: dict[str, list[WorkerProcess]]
) -> None:
    tab.goto(fleet)
    tab.get_by_role("button", name="south-0").click()
    expect(tab.locator("#chat-link")).to_have_attribute("href", "chat/?model=south")
    worker = workers["south"][0]
    headers = {"authorization": f"Bearer {token_of('south-0')}"}
    body = {"job_id": "j", "prompt": FOX, "max_tokens": 900, "ignore_eos": True}
    with worker.client() as client:
        with client.stream("POST", "/execute", json=body, headers=headers) as response:
            chunks = response.iter_raw()
            next(chunks)
            worker.freeze_engine()
            expect(tab.locator("#requests tr")).to_have_count(1)
            worker.thaw_engine()
            tab.get_by_role("button", name="north-0").click()
            expect(tab.locator("#requests tr")).to_have_count(0)


def test_one_chats_with_the_model_chosen(
    tab: Any, fleet: str, workers: dict[str, list[WorkerProcess]]
) -> None:
    """First with the linked model, then with another from the page's own list."""
    failed: list[str] = []
    tab.on("response", lambda each: failed.append(each.url) if each.status >= 400 else None)
    tab.goto(fleet)
    tab.get_by_role("button", name="south-0").click()
    expect(tab.locator("#chat-link")).to_have_attribute("href", "chat/?model=south")
    chat = Chat(tab, fleet, "?model=south")
    assert "Paris" in chat.ask(FRANCE)
    expect(chat.answers.last).to_contain_text("south")
    chat.page.get_by_role("button", name=re.compile("south")).last.click()
    chat.page.get_by_role("option", name="north").click()
    assert "Rome" in chat.ask("What is the capital of Italy?")
    expect(chat.answers.last).to_contain_text("north")
    assert failed == []


def test_a_reload_in_mid_answer_goes_on_at_the_worker_that_has_it(
    tab: Any, fleet: str, workers: dict[str, list[WorkerProcess]]
) -> None:
    chat = Chat(tab, fleet, "?model=south", customJson='{"ignore_eos": true, "max_tokens": 600}')
    with chat.in_mid_answer("Tell me a story.", workers["south"][0]):
        tab.reload()
        expect(tab.get_by_label("User message with actions")).to_contain_text("Tell me a story.")
        expect(chat.answers.last).to_contain_text(re.compile(r"\w+ \w+ \w+"))
    assert "600 tokens" in chat.complete()
