"""Observations that the tests of the page share."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

PATIENCE_MS = 180_000


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
    """Ignore what the browser itself logs for 4xx and 5xx, such as `/ready` before the worker is
    ready."""
    return message.type == "error" and not message.text.startswith("Failed to load resource")


def own_hosts(page: Any) -> list[str]:
    """A list that grows with the host of each request for the page; requests that its policy
    forbids are not made."""
    hosts: list[str] = []

    def host_of(request: Any) -> str:
        return urlsplit(str(request.url)).netloc

    def failed(request: Any) -> None:
        if request.failure == "csp":
            hosts.remove(host_of(request))

    page.context.on("request", lambda request: hosts.append(host_of(request)))
    page.context.on("requestfailed", failed)
    return hosts


def violations(page: Any) -> list[str]:
    """Return axe's findings: each rule and the first element that violates it."""
    from axe_playwright_python import sync_playwright as axe

    found = axe.Axe().run(page).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]


def hide(page: Any) -> None:
    """Hide the page, like a background tab."""
    page.evaluate(
        "Object.defineProperty(document, 'visibilityState', {get: () => 'hidden'});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
