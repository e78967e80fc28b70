"""What the tests of the page do and see in it."""

from __future__ import annotations

from typing import Any

PATIENCE_MS = 60_000


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect as expectation

    expectation.set_options(timeout=PATIENCE_MS)
    return expectation(locator)


def faults_of(page: Any) -> list[str]:
    """A list that grows with each error of the page's console and scripts."""
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if is_fault(message) else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    return faults


def is_fault(message: Any) -> bool:
    """The browser itself notes each answer of 4xx and 5xx, such as `/ready` before it is ready."""
    return message.type == "error" and not message.text.startswith("Failed to load resource")


def open_playground(page: Any) -> None:
    page.get_by_role("tab", name="Playground").click()


def ask(page: Any, text: str) -> None:
    open_playground(page)
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def answered(page: Any) -> None:
    """Wait for the end of the answer."""
    expect(page.locator("#usage")).to_contain_text("ended")
