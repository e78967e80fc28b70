"""The panes of the status page for models that do not chat: base, embedder, reranker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartWorker
from tests.support.bundled import bundled_with_template
from tests.system.page.watching import expect
from tests.system.worker.test_embeddings import pooling_gguf
from tests.unit.convert.test_reranker import reranker

pytestmark = pytest.mark.long
__all__ = ["pooling_gguf"]


@pytest.fixture
def opened(browser: Any, start_worker: StartWorker) -> Iterator[Any]:
    """Return a function that starts a worker with a model and opens its page."""
    page = browser.new_page()

    def start(model: Path, *more: str) -> Any:
        page.goto(start_worker("--model", str(model), *more).base_url)
        return page

    yield start
    page.close()


def test_a_base_model_goes_on(opened: Any, tmp_path: Path) -> None:
    page = opened(bundled_with_template(tmp_path / "base.gguf", None))
    page.get_by_label("A text to continue").fill("Once upon a time")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#try-said")).to_contain_text("a second")
    shown = page.locator("#try-answer").inner_text()
    assert shown.startswith("Once upon a time") and len(shown) > 20
    assert page.locator("#chat-link").is_hidden() and page.locator("#no-chat").is_hidden()


def test_texts_are_compared(opened: Any, pooling_gguf: Path) -> None:
    page = opened(pooling_gguf)
    texts = "The fox loved to dance.\nWhat is 3 plus 4?\nThe fox loved to dance."
    page.get_by_label("Two or more texts").fill(texts)
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("#try-answer tbody tr")).to_have_count(3)
    cells = page.locator("#try-answer tbody tr").first.locator("td").all_inner_texts()
    assert cells[1] == cells[3] == "1.000" and float(cells[2]) < 1


def test_documents_are_ranked(opened: Any, tmp_path: Path) -> None:
    page = opened(reranker(tmp_path, "Qwen3-Reranker-0.6B"), "--context-length", "512")
    page.get_by_label("A question, then").fill("foxes?\na fox\na stone")
    page.get_by_role("button", name="Rank").click()
    expect(page.locator("#try-answer tbody tr")).to_have_count(2)
    scores = page.locator("#try-answer tbody td:first-child").all_inner_texts()
    assert sorted(scores, key=float, reverse=True) == scores


def test_what_went_wrong_is_a_sentence(tab: Any, start_worker: StartWorker, tmp_path: Path) -> None:
    base = bundled_with_template(tmp_path / "base.gguf", None)
    worker = start_worker("--model", str(base))
    tab.goto(worker.base_url)
    box, send = tab.get_by_label("A text to continue"), tab.locator("#try-send")
    box.fill("word " * 20_000)
    send.click()
    expect(tab.locator("#try-said")).to_contain_text("tokens")
    assert box.input_value(), "what was typed is kept"
    worker.kill()
    box.fill("Once")
    send.click()
    expect(tab.locator("#try-said")).to_contain_text("The worker does not answer")
