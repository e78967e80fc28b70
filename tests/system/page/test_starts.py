"""The page of a worker that has just been started: it is loading, or it needs a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartWorker
from tests.support.bundled import bundled_gguf
from tests.support.hub_server import Repo, running_hub
from tests.support.worker import WorkerProcess
from tests.system.page.watching import expect, faults_of

pytestmark = pytest.mark.long
TOKEN = "correct-horse-battery"


@pytest.fixture
def downloading(start_worker: StartWorker, tmp_path: Path) -> Iterator[WorkerProcess]:
    """A worker whose model takes some seconds to download."""
    with running_hub() as hub:
        # Nothing reads the bytes after the tensors; progress comes every 10 MB.
        hub.repos["o/r"] = Repo({"m.gguf": bundled_gguf("f32").read_bytes() + bytes(60 << 20)})
        hub.chunk_delay_seconds = 0.08
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
        model = ("--model", "hf:o/r::file=m.gguf")
        yield start_worker(*model, cache_dir=tmp_path / "cache", env=env, wait_ready=False)


def test_the_load_is_seen_moving(browser: Any, downloading: WorkerProcess) -> None:
    page = browser.new_page()
    page.goto(downloading.base_url)
    page.evaluate(
        "window.seen = []; new MutationObserver(() => {"
        " const bar = document.querySelector('#loading-bar');"
        " window.seen.push([document.querySelector('#loading-text').textContent, bar.value]); })"
        ".observe(document.querySelector('#loading'),"
        " {attributes: true, childList: true, characterData: true, subtree: true})"
    )
    expect(page.locator("#state .dot")).to_have_class("dot ready")
    seen = page.evaluate("window.seen")
    shares = [share for text, share in seen if text.startswith("Downloading")]
    assert len(set(shares)) >= 5 and shares == sorted(shares), seen
    assert any("/s" in text for text, _ in seen), "no rate"
    expect(page.locator("#loading")).to_be_hidden()
    page.close()


@pytest.fixture
def secret(start_worker: StartWorker) -> WorkerProcess:
    """A worker that needs a token."""
    return start_worker(env={"LLORCH_WORKER_TOKEN": TOKEN})


def give(page: Any, token: str) -> None:
    page.locator("#token").fill(token)
    page.get_by_role("button", name="Use it").click()


def test_a_token_is_asked_for_and_forgotten(browser: Any, secret: WorkerProcess) -> None:
    page = browser.new_page()
    faults = faults_of(page)
    page.goto(secret.base_url)
    expect(page.locator("#token-form")).to_be_visible()
    assert page.locator("#facts dd").count() == 0
    give(page, "wrong")
    expect(page.locator("#token-text")).to_contain_text("does not accept this token")
    give(page, TOKEN)
    expect(page.locator("#facts")).to_contain_text("tiny-model")
    expect(page.locator("#token-form")).to_be_hidden()
    expect(page.locator("#refusals-text")).to_have_text("None.")  # the page's attempt is not one
    kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
    assert TOKEN not in page.evaluate(kept) and TOKEN not in page.content()
    page.reload()
    expect(page.locator("#token-form")).to_be_visible()
    page.goto(f"{secret.base_url}/docs")
    give(page, TOKEN)
    expect(page.locator("#operations")).to_contain_text("POST /execute")
    assert faults == []
    page.close()


def test_a_late_refusal_of_no_token_is_none_of_the_token(
    browser: Any, secret: WorkerProcess
) -> None:
    """A refusal of an earlier request that arrives after the token was entered."""
    page = browser.new_page()
    page.goto(secret.base_url)
    expect(page.locator("#token-form")).to_be_visible()
    held: list[Any] = []
    page.route("**/status", lambda route: route.continue_() if held else held.append(route))
    with page.expect_request("**/status"):
        pass
    give(page, TOKEN)
    page.wait_for_timeout(200)
    held[0].continue_()
    expect(page.locator("#facts")).to_contain_text("tiny-model")
    expect(page.locator("#token-form")).to_be_hidden()
    page.close()
