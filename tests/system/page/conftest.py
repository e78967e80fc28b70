"""A real worker, and the machine's browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.worker import WorkerProcess
from tests.system.page.watching import PATIENCE_MS, faults_of


@pytest.fixture(scope="package")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("page")
    # Tests hold the engine while the browser works, which may take long on a busy machine.
    flags = ("--slots", "64", "--stall-timeout", "600")
    running = WorkerProcess.start(*flags, folder=folder, cache_dir=folder / "cache")
    yield running
    running.kill()


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium is not None, "this needs Chromium, such as Debian's package chromium"
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        opened.on("context", lambda context: context.set_default_timeout(PATIENCE_MS))
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, worker: WorkerProcess) -> Iterator[Any]:
    """The page, opened; its console must stay free of errors."""
    opened = browser.new_page()
    faults = faults_of(opened)
    opened.goto(worker.base_url)
    opened.wait_for_selector("#facts dd", state="attached")
    yield opened
    opened.close()
    assert faults == []


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A page with its own browser storage."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    yield context.new_page()
    context.close()
