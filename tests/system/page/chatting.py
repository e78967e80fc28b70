"""llama-server's chat page for the tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.worker import WorkerProcess
from tests.system.page.watching import PATIENCE_MS, expect

CONFIG = "LlamaUi.config"
STORED_WITH_MODEL = """async () => {
  const done = (asked) => new Promise((found) => { asked.onsuccess = () => found(asked.result); });
  const stored = (await done(indexedDB.open('LlamaUi'))).transaction('messages');
  const messages = await done(stored.objectStore('messages').getAll());
  return messages.some(({ role, model }) => role === 'assistant' && model);
}"""


class Chat:
    """The opened page of one browser tab; `settings` are settings of the page."""

    def __init__(self, page: Any, base_url: str, query: str = "", **settings: Any) -> None:
        self.page = page
        kept = json.dumps({"temperature": 0, **settings})
        # Before the page's scripts run, but not again after a reload.
        page.add_init_script(
            f"localStorage.getItem('{CONFIG}') ?? localStorage.setItem('{CONFIG}', {kept!r});"
            # Two browser tools take nearly half of the bundled model's context.
            "localStorage.setItem('LlamaUi.disabledToolCategories', '[\"browser\"]');"
        )
        page.goto(f"{base_url}/chat/{query}")

    @property
    def box(self) -> Any:
        return self.page.get_by_placeholder("Type a message")

    @property
    def stop(self) -> Any:
        return self.page.get_by_role("button", name="Stop generation")

    @property
    def answers(self) -> Any:
        return self.page.get_by_label("Assistant message with actions")

    def send(self, text: str) -> None:
        self.box.fill(text)
        # While the page chooses a model, a hint covers the button, which is disabled.
        self.page.get_by_role("button", name="Send", exact=True).last.click()

    @contextmanager
    def in_mid_answer(self, text: str, worker: WorkerProcess) -> Iterator[None]:
        """Send a text, and hold the engine in the middle of the answer for this block."""
        self.send(text)
        expect(self.answers.last).to_contain_text(re.compile(r"\w+ \w+ \w+"))
        worker.freeze_engine()
        # After a reload the page shows no tokens or speed for an answer without a model.
        self.page.wait_for_function(STORED_WITH_MODEL, timeout=PATIENCE_MS)
        yield
        worker.thaw_engine()

    def ask(self, text: str) -> str:
        """Send a text; returns the complete answer."""
        n_before = self.answers.count()
        self.send(text)
        expect(self.answers).to_have_count(n_before + 1)
        return self.complete()

    def complete(self) -> str:
        """Wait for the last answer to complete, and return it."""
        last = self.answers.last
        expect(last.get_by_role("button", name="Regenerate")).to_be_visible()
        expect(last).to_contain_text("t/s")
        expect(self.stop).to_have_count(0)
        text: str = last.inner_text()
        return text
