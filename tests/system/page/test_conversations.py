"""Conversations in the chat page beyond typing and clicking: keyboard only, files, forks,
reasoning."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.conftest import StartWorker
from tests.support.pictures import picture
from tests.support.random_models import random_model
from tests.support.random_projectors import AROUND_TILES, random_projector
from tests.support.worker import WorkerProcess
from tests.system.page.chatting import Chat
from tests.system.page.keyboard import is_focus_seen, tab_to
from tests.system.page.watching import expect, own_hosts
from tests.system.worker.test_sounds import sound

pytestmark = pytest.mark.long
FRANCE = "What is the capital of France?"
DROP = """([name, type, data]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, {type}));
  const target = document.querySelector('textarea');
  for (const kind of ['dragenter', 'dragover', 'drop']) {
    const given = {bubbles: true, cancelable: true, dataTransfer: transfer};
    target.dispatchEvent(new DragEvent(kind, given));
  }
}"""


def test_a_conversation_with_the_keyboard_alone(tab: Any, worker: WorkerProcess) -> None:
    """Ask, regenerate, edit, stop, and start a new one."""
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
    worker.wait_idle()
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
    """Both branches exist, and one can switch between them."""
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


PDF = b"""%PDF-1.4
1 0 obj <</Type /Catalog /Pages 2 0 R>> endobj
2 0 obj <</Type /Pages /Kids [3 0 R] /Count 1>> endobj
3 0 obj <</Type /Page /Parent 2 0 R /MediaBox [0 0 200 99] /Contents 4 0 R /Resources
  <</Font <</F <</Type /Font /Subtype /Type1 /BaseFont /Helvetica>>>>>>>> endobj
4 0 obj <</Length 46>> stream
BT /F 20 Tf 20 40 Td (A fox was brave.) Tj ET
endstream endobj
trailer <</Root 1 0 R>>
"""
SENSES = {
    "seeing": lambda: (random_model("dense", renamed=AROUND_TILES), random_projector("gemma3")),
    "hearing": lambda: (random_model("dense"), random_projector("qwen2a")),
}
FILES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "noise.png": ("image/png", lambda: picture(1)),
    "noise.wav": ("audio/wav", sound),
    "fox.pdf": ("application/pdf", lambda: PDF),
}


@pytest.fixture(scope="module")
def with_sense(share_worker: StartWorker) -> Callable[[str], WorkerProcess]:
    """Return a function that starts a worker whose model accepts pictures or sounds."""

    @cache
    def started(sense: str) -> WorkerProcess:
        model, projector = SENSES[sense]()
        files = ("--model", str(model), "--mmproj", str(projector))
        return share_worker(*files, "--context-length", "2048", "--slots", "2")

    return started


@pytest.mark.parametrize(
    "sense, name, way, kind",
    [
        ("seeing", "noise.png", "chosen", "image_url"),
        ("seeing", "noise.png", "dropped", "image_url"),
        ("seeing", "fox.pdf", "chosen", "text"),
        ("seeing", "fox.pdf", "as pictures", "image_url"),
        ("hearing", "noise.wav", "chosen", "input_audio"),
    ],
)
def test_a_file_comes_to_the_model(
    tab: Any,
    with_sense: Callable[[str], WorkerProcess],
    sense: str,
    name: str,
    way: str,
    kind: str,
) -> None:
    worker = with_sense(sense)
    hosts, sent = own_hosts(tab), []
    tab.on("request", lambda each: sent.append(each) if "completions" in each.url else None)
    chat = Chat(
        tab, worker.base_url, customJson='{"max_tokens": 16}', pdfAsImage=way == "as pictures"
    )
    expect(chat.box).to_be_visible()
    media_type, made = FILES[name]
    if way == "dropped":
        tab.evaluate(DROP, [name, media_type, base64.b64encode(made()).decode()])
    else:
        file = {"name": name, "mimeType": media_type, "buffer": made()}
        tab.locator("input[type=file]").set_input_files(file)
    expect(tab.get_by_role("button", name=re.compile("Remove")).first).to_be_attached()
    chat.ask("What is it?")
    parts = json.loads(sent[0].post_data)["messages"][-1]["content"]
    assert sorted(part["type"] for part in parts) == sorted([kind, "text"])
    assert kind != "text" or any("A fox was brave." in part["text"] for part in parts)
    assert {host for host in hosts if host} == {worker.base_url.removeprefix("http://")}
