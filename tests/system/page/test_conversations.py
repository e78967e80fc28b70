"""Conversations in the chat page by other ways than typing and clicking: the keyboard alone, a
picture, a fork."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pictures import picture
from tests.support.random_models import random_model
from tests.support.random_projectors import AROUND_TILES, random_projector
from tests.support.worker import WorkerProcess
from tests.system.page.chatting import Chat
from tests.system.page.keyboard import is_focus_seen, tab_to
from tests.system.page.watching import expect, own_hosts

pytestmark = pytest.mark.long
FRANCE = "What is the capital of France?"
DROP = """([name, data]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, {type: 'image/png'}));
  const target = document.querySelector('textarea');
  for (const kind of ['dragenter', 'dragover', 'drop']) {
    const given = {bubbles: true, cancelable: true, dataTransfer: transfer};
    target.dispatchEvent(new DragEvent(kind, given));
  }
}"""


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    yield context.new_page()
    context.close()


def test_a_conversation_with_the_keyboard_alone(tab: Any, worker: WorkerProcess) -> None:
    """Ask, regenerate, edit, stop, and a new one."""
    chat = Chat(tab, worker.base_url)
    expect(chat.box).to_be_focused()
    tab.keyboard.type(FRANCE)
    tab.keyboard.press("Enter")
    assert "Paris" in chat.complete()
    tab_to(tab, "Regenerate")
    assert is_focus_seen(tab)
    tab.keyboard.press("Enter")
    expect(chat.answers.last).to_contain_text("2/2")
    assert "Paris" in chat.complete()
    tab_to(tab, "Edit")
    assert is_focus_seen(tab)
    tab.keyboard.press("Enter")
    expect(tab.locator("textarea").first).to_be_focused()
    tab.keyboard.press("Control+a")
    tab.keyboard.type("What is the capital of Italy?")
    tab.keyboard.press("Enter")
    expect(chat.answers.last).to_contain_text("Rome")
    chat.complete()
    tab_to(tab, "New chat")
    assert is_focus_seen(tab)
    tab.keyboard.press("Enter")
    expect(chat.answers).to_have_count(0)
    expect(chat.box).to_be_focused()


def test_an_answer_is_stopped_with_the_keyboard(tab: Any, worker: WorkerProcess) -> None:
    chat = Chat(tab, worker.base_url, customJson='{"ignore_eos": true, "max_tokens": 900}')
    expect(chat.box).to_be_focused()
    tab.keyboard.type("Tell me a story.")
    tab.keyboard.press("Enter")
    expect(chat.stop).to_be_visible()
    worker.freeze_engine()
    tab_to(tab, "Stop generation")
    tab.keyboard.press("Enter")
    worker.thaw_engine()
    worker.wait_idle(60)
    expect(chat.box).to_be_editable()


def test_a_conversation_is_forked_and_both_go_on(tab: Any, worker: WorkerProcess) -> None:
    chat = Chat(tab, worker.base_url)
    chat.ask(FRANCE)
    chat.ask("What is the capital of Italy?")
    whole = tab.url
    chat.answers.first.get_by_role("button", name="Fork conversation").click()
    tab.get_by_role("alertdialog").get_by_role("button", name="Fork", exact=True).click()
    expect(chat.answers).to_have_count(1)
    assert tab.url != whole
    chat.ask("What is the capital of Spain?")
    expect(tab.get_by_text("What is the capital of Italy?")).to_have_count(0)
    tab.goto(whole)
    expect(chat.answers).to_have_count(2)
    expect(tab.get_by_text("What is the capital of Spain?")).to_have_count(0)


def test_an_edited_question_keeps_what_was_before(tab: Any, worker: WorkerProcess) -> None:
    """Both branches are there, and one goes from one to the other."""
    chat = Chat(tab, worker.base_url)
    assert "Paris" in chat.ask(FRANCE)
    mine = tab.get_by_label("User message with actions")
    mine.get_by_role("button", name="Edit").click()
    tab.locator("textarea").first.fill("What is the capital of Italy?")
    tab.keyboard.press("Enter")
    expect(chat.answers.last).to_contain_text("Rome")
    chat.complete()
    expect(mine).to_contain_text("2/2")
    mine.get_by_role("button", name="Previous").click()
    expect(chat.answers.last).to_contain_text("Paris")
    expect(mine).to_contain_text("1/2")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("seeing")
    model = random_model("dense", renamed=AROUND_TILES)
    flags = ("--model", str(model), "--mmproj", str(random_projector("gemma3")))
    worker = WorkerProcess.start(
        *flags, "--context-length", "2048", "--slots", "2",
        folder=folder, cache_dir=folder / "cache",
    )  # fmt: skip
    yield worker
    worker.kill()


@pytest.mark.parametrize("is_dropped", [False, True], ids=["chosen", "dropped"])
def test_a_picture_is_seen_by_the_model(
    tab: Any, seeing: WorkerProcess, tmp_path: Path, is_dropped: bool
) -> None:
    asked, sent = own_hosts(tab), []
    tab.on("request", lambda each: sent.append(each) if "completions" in each.url else None)
    chat = Chat(tab, seeing.base_url, customJson='{"max_tokens": 16}')
    expect(chat.box).to_be_visible()
    if is_dropped:
        tab.evaluate(DROP, ["noise.png", base64.b64encode(picture(1)).decode()])
    else:
        (tmp_path / "noise.png").write_bytes(picture(1))
        tab.locator("input[type=file]").set_input_files(tmp_path / "noise.png")
    expect(tab.get_by_role("img", name="noise.png").first).to_be_visible()
    chat.ask("What is it?")
    body = json.loads(sent[0].post_data)
    kinds = [part["type"] for part in body["messages"][-1]["content"]]
    assert sorted(kinds) == ["image_url", "text"]
    expect(tab.get_by_label("User message with actions").get_by_role("img")).to_be_visible()
    assert {host for host in asked if host} == {seeing.base_url.removeprefix("http://")}
