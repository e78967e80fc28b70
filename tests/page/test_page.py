"""The page as a person meets it: a real worker, a real browser. Needs Chromium; `make page-test`.

Looks for what would hurt: a policy that the browser finds broken, a script that a model's answer
brings along, a request that goes on after Stop, text that a screen reader cannot reach.
"""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

import pytest

from tests.page.watching import answered, ask, expect, open_playground
from tests.support.worker import WorkerProcess, until

pytestmark = pytest.mark.long
FRANCE = "What is the capital of France?"
FOX = "Once upon a time, there was a brave fox named"
HOSTILE = (
    "<script>window.hurt=1</script><img src=x onerror='window.hurt=2'>\n\n"
    "[click](javascript:window.hurt=3)\n\n<a href='data:text/html,x'>y</a>\n\n"
    "<iframe src='https://example.com'></iframe><style>body{display:none}</style>\n\n**bold**"
)
DANGEROUS = re.compile(r"<(script|img|iframe|style)|javascript:|data:|onerror\s*=\s*[^'&]", re.I)


def cells(worker: WorkerProcess) -> dict[str, float]:
    return {name: worker.metric(f"worker_kv_cells_{name}") for name in ("used", "cached", "total")}


def test_status_shows_what_the_worker_says(page: Any, worker: WorkerProcess) -> None:
    expect(page.locator(".dot")).to_have_class("dot ready")
    info = worker.get("/info").json()
    facts = page.inner_text("#facts")
    assert info["model"]["name"] in facts and info["engine"]["threads_derivation"] in facts
    assert page.locator("#buffers tr").count() == len(info["residency"]["buffers"])
    expect(page.locator("#restarts-text")).to_contain_text("None")


def test_the_memory_map_is_to_scale(page: Any, worker: WorkerProcess) -> None:
    engine = worker.get("/info").json()["engine"]
    plan, total = engine["plan"], engine["device_total_bytes"]
    expect(page.locator("#memory-legend li")).to_have_count(6)

    def share(part: str, bar: str) -> float:
        widths = [page.locator(each).bounding_box()["width"] for each in (f"{bar} .{part}", bar)]
        return float(widths[0] / widths[1])

    needed = sum(plan.values())
    assert share("worker", "#device-bar") == pytest.approx(needed / total, abs=0.005)
    for part in ("weights", "margin"):
        assert share(part, "#worker-bar") == pytest.approx(plan[part] / needed, abs=0.005)
    assert "weights" in page.get_attribute("#memory", "aria-label")


def test_a_chat_is_streamed_and_counted(page: Any) -> None:
    open_playground(page)
    page.get_by_label("temperature").fill("0")
    page.evaluate(
        "window.seen = new Set(); new MutationObserver(() => {"
        " const last = document.querySelector('#conversation article:last-child .markdown');"
        " if (last) window.seen.add(last.textContent); })"
        ".observe(document.querySelector('#conversation'), {childList: true, subtree: true})"
    )
    ask(page, FRANCE)
    answered(page)
    assert "Paris" in page.inner_text("#conversation article:last-child")
    assert re.search(r"16 prompt tokens", page.inner_text("#usage"))
    assert len(page.evaluate("[...window.seen]")) >= 3, "the answer came in one piece"


def test_tokens_are_coloured_with_their_alternatives(page: Any) -> None:
    open_playground(page)
    page.get_by_label("colour tokens by probability").check()
    ask(page, FRANCE)
    answered(page)
    page.locator(".token").first.hover()
    shown = page.inner_text("#alternatives").splitlines()
    assert len(shown) == 5 and all("%" in line for line in shown)


def test_stop_frees_the_cells(page: Any, worker: WorkerProcess) -> None:
    before = worker.metric('worker_requests_total{outcome="cancelled"}')
    open_playground(page)
    page.get_by_label("raw completion").check()
    page.get_by_label("max tokens").fill("900")
    ask(page, FOX)
    answer = page.locator("#conversation article:last-child .plain")
    expect(answer).to_have_text(re.compile(".{20}", re.S))
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#usage")).to_have_text("stopped")
    worker.wait_idle(60)
    until(lambda: cells(worker)["used"] == cells(worker)["cached"], 60, lambda: str(cells(worker)))
    assert worker.metric('worker_requests_total{outcome="cancelled"}') == before + 1
    steps = worker.metric("worker_engine_steps")
    page.wait_for_timeout(500)
    assert worker.metric("worker_engine_steps") == steps, "the engine goes on"


def test_charts_show_the_workers_metrics(page: Any, worker: WorkerProcess) -> None:
    def values(title: str) -> Any:
        return page.locator("#charts figure", has_text=title).locator(".values")

    with worker.streaming(FOX, max_tokens=900, ignore_eos=True) as response:
        chunks = response.iter_raw()
        next(chunks)
        expect(values("Requests")).to_contain_text("running 1")
        expect(values("Tokens a second")).to_have_text(re.compile(r"[1-9]"))
        for _ in chunks:
            continue
    expect(values("Requests")).to_contain_text("running 0")
    now = cells(worker)
    share = 100 * now["cached"] / now["total"]
    expect(values("KV cells")).to_contain_text(f"cached {share:.1f}" if share % 1 else f"{share}")
    expect(values("First token")).to_have_text(re.compile(r"p50 \d.*p95 \d"))


def test_a_hostile_answer_is_harmless(browser: Any, worker: WorkerProcess) -> None:
    """A schema makes the model itself write it, as a JSON string. The renderer is given the bare
    text too. The browser may note that its policy refused what came along."""
    page = browser.new_page()
    page.goto(worker.base_url)
    open_playground(page)
    page.get_by_text("JSON schema and tools").click()
    page.get_by_label("JSON schema of the answer").fill(json.dumps({"const": HOSTILE}))
    ask(page, "Hurt me.")
    answered(page)
    written = page.locator("#conversation article:last-child .markdown")
    assert "click" in written.inner_text() and "bold" in written.inner_text()
    page.evaluate(
        "async (text) => { const { render } = await import('/page/markdown.js');"
        " const target = document.createElement('div'); document.body.append(target);"
        " target.id = 'hostile'; render(target, text); }",
        HOSTILE,
    )
    page.wait_for_timeout(300)
    assert page.evaluate("window.hurt") is None
    bare = page.inner_html("#hostile")
    assert not DANGEROUS.search(bare) and not DANGEROUS.search(written.inner_html())
    assert "<strong>bold</strong>" in bare
    page.close()


def test_a_reader_who_cannot_see_can_use_it(page: Any) -> None:
    from axe_playwright_python import sync_playwright as axe

    for name in ("Status", "Playground"):
        page.get_by_role("tab", name=name).click()
        found = axe.Axe().run(page).response["violations"]
        serious = [each["id"] for each in found if each["impact"] in ("serious", "critical")]
        assert serious == []


def test_the_keyboard_is_enough(page: Any) -> None:
    page.get_by_role("tab", name="Status").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Playground")).to_be_focused()
    page.get_by_label("Message").focus()
    page.keyboard.type(FRANCE)
    page.keyboard.press("Control+Enter")
    answered(page)


def test_metrics_are_asked_for_only_while_the_page_is_seen(page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with page.expect_request("**/metrics"):
        pass
    hide(page)
    page.wait_for_timeout(500)
    asked.clear()
    page.wait_for_timeout(5000)
    assert asked == []


def hide(page: Any) -> None:
    """As a browser does to a tab that is not in front."""
    page.evaluate(
        "Object.defineProperty(document, 'visibilityState', {get: () => 'hidden'});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )


def test_a_restart_of_the_engine_is_told(page: Any, worker: WorkerProcess) -> None:
    os.kill(worker.engine_pid, signal.SIGKILL)
    expect(page.locator("#restarts")).to_contain_text("SIGKILL")
    expect(page.locator("#restarts-text")).to_contain_text("1 since the start")
    expect(page.locator(".dot")).to_have_class("dot ready")
    assert worker.metric("worker_engine_respawns_total") == 1
