"""The page as a person meets it: a real worker, a real browser. Needs Chromium; `make page-test`.

Looks for what would hurt: a policy that the browser finds broken, a script that a model's answer
brings along, a request that goes on after Stop, text that a screen reader cannot reach.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker import ROOT, WorkerProcess

pytestmark = pytest.mark.long
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = (
    "<script>window.hurt=1</script><img src=x onerror='window.hurt=2'>\n\n"
    "[click](javascript:window.hurt=3)\n\n<a href='data:text/html,x'>y</a>\n\n"
    "<iframe src='https://example.com'></iframe><style>body{display:none}</style>\n\n**bold**"
)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("page")
    running = WorkerProcess.start(folder=folder, cache_dir=folder / "cache")
    yield running
    running.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, worker: WorkerProcess) -> Iterator[Any]:
    """The page, opened; its console must stay free of errors."""
    opened = browser.new_page()
    errors: list[str] = []
    opened.on("console", lambda m: errors.append(m.text) if is_fault(m) else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(worker.base_url)
    yield opened
    opened.close()
    assert errors == []


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect as expectation

    return expectation(locator)


def is_fault(message: Any) -> bool:
    """The browser itself notes each answer of 4xx and 5xx, such as `/ready` before it is ready."""
    return message.type == "error" and not message.text.startswith("Failed to load resource")


def ask(page: Any, text: str) -> None:
    page.get_by_role("tab", name="Playground").click()
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def test_status_shows_what_the_worker_says(page: Any) -> None:
    page.wait_for_selector(".dot.ready")
    page.wait_for_selector("#facts dd")
    assert "tiny-model" in page.inner_text("#facts")
    legend = page.inner_text("#memory-legend")
    assert all(part in legend for part in ("weights", "KV free", "compute", "margin"))
    assert page.locator("#buffers tr").count() >= 3
    page.wait_for_selector("#charts canvas")


def test_a_chat_is_streamed_and_counted(page: Any) -> None:
    page.wait_for_selector(".dot.ready")
    page.get_by_role("tab", name="Playground").click()
    page.get_by_label("temperature").fill("0")
    ask(page, "What is the capital of France?")
    expect(page.locator("#usage")).to_contain_text("ended", timeout=60_000)
    assert "Paris" in page.inner_text("#conversation article:last-child")
    assert re.search(r"\d+ prompt tokens", page.inner_text("#usage"))


def test_tokens_are_coloured_with_their_alternatives(page: Any) -> None:
    page.get_by_role("tab", name="Playground").click()
    page.get_by_label("colour tokens by probability").check()
    ask(page, "What is the capital of France?")
    expect(page.locator("#usage")).to_contain_text("ended", timeout=60_000)
    page.locator(".token").first.hover()
    assert "%" in page.inner_text("#alternatives")


def test_stop_really_cancels(page: Any, worker: WorkerProcess) -> None:
    page.get_by_role("tab", name="Playground").click()
    page.get_by_label("raw completion").check()
    page.get_by_label("max tokens").fill("900")
    ask(page, "Once upon a time, there was a brave fox named")
    answer = page.locator("#conversation article:last-child .plain")
    expect(answer).to_have_text(re.compile(".{20}", re.S), timeout=60_000)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#usage")).to_have_text("stopped")
    worker.wait_idle()
    assert worker.metric('worker_requests_total{outcome="cancelled"}') >= 1


def test_a_hostile_answer_is_harmless(browser: Any, worker: WorkerProcess) -> None:
    """The model's own text cannot be chosen, so the page's renderer is given it directly. The
    browser may note that its policy refused what came along."""
    page = browser.new_page()
    page.goto(worker.base_url)
    page.evaluate(
        "async (text) => { const { render } = await import('/page/markdown.js');"
        " const target = document.createElement('div'); document.body.append(target);"
        " target.id = 'hostile'; render(target, text); }",
        HOSTILE,
    )
    page.wait_for_timeout(300)
    assert page.evaluate("window.hurt") is None
    html = page.inner_html("#hostile")
    assert not re.search(r"<(script|img|iframe|style)|javascript:|data:|onerror", html)
    assert "<strong>bold</strong>" in html
    page.close()


def test_a_reader_who_cannot_see_can_use_it(page: Any) -> None:
    from axe_playwright_python import sync_playwright as axe

    page.wait_for_selector("#facts dd")
    for name in ("Status", "Playground"):
        page.get_by_role("tab", name=name).click()
        found = axe.Axe().run(page).response["violations"]
        serious = [each["id"] for each in found if each["impact"] in ("serious", "critical")]
        assert serious == []


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 360)])
def test_it_fits_and_is_photographed(
    browser: Any, worker: WorkerProcess, scheme: str, width: int
) -> None:
    pictures = ROOT / ".page-screenshots"
    pictures.mkdir(exist_ok=True)
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    opened = context.new_page()
    opened.goto(worker.base_url)
    opened.wait_for_selector("#facts dd")
    for tab in ("Status", "Playground"):
        opened.get_by_role("tab", name=tab).click()
        opened.wait_for_timeout(2500)
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
        opened.screenshot(path=pictures / f"{tab.lower()}-{scheme}-{width}.png")
    context.close()


def test_metrics_are_asked_for_only_while_the_page_is_seen(page: Any) -> None:
    page.wait_for_selector("#facts dd")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate(
        "Object.defineProperty(document, 'visibilityState', {get: () => 'hidden'});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_timeout(500)
    asked.clear()
    page.wait_for_timeout(5000)
    assert asked == []


def test_the_page_is_light_and_closed(worker: WorkerProcess) -> None:
    response = worker.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    folder = Path(ROOT, "worker", "assets", "page")
    served = [p for p in folder.rglob("*") if p.suffix in (".html", ".css", ".js", ".svg")]
    assert sum(p.stat().st_size for p in served) < 200_000
    for name in ("page.css", "app.js", "vendor/purify.min.js"):
        assert worker.get(f"/page/{name}").status_code == 200
    assert worker.get("/page/../../settings.py").status_code == 404
