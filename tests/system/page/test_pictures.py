"""Screenshots of both themes, a narrow screen and a terminal. Nothing may overflow.

`make page-test PICTURES=docs/pictures` retakes the pictures of the README.
"""

from __future__ import annotations

import html
import io
import os
import pty
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.conftest import StartWorker
from tests.support.bundled import bundled_gguf
from tests.support.hub_server import Repo, running_hub
from tests.support.worker import WorkerProcess, environment, installed, until
from tests.system.page.chatting import Chat
from tests.system.page.watching import expect

pytestmark = pytest.mark.long
FOLDER = ROOT / ".page-screenshots"
README_FOLDER = ROOT / os.environ.get("PICTURES", ".page-screenshots")
LARGEST_BYTES = 60_000
N_COLOURS = 72
README_WIDTH = 1200
FOX = "Once upon a time, there was a brave fox named"
TERMINAL = """<!doctype html><style>
body { margin: 0; background: #14161a; }
pre { margin: 0; padding: 16px 20px; color: #e8eaf0; font: 14px/1.35 "DejaVu Sans Mono", monospace;
  width: max-content; }
</style><pre>"""


def keep(picture: bytes, name: str, *, is_for_readme: bool = True) -> None:
    """Save it with few colours, which suffice for flat areas."""
    from PIL import Image

    folder = README_FOLDER if is_for_readme else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    whole = Image.open(io.BytesIO(picture)).convert("RGB")
    kinds = Image.Quantize.MEDIANCUT  # keeps the colours of flat areas unchanged
    whole.quantize(N_COLOURS, kinds, dither=Image.Dither.NONE).save(path, optimize=True)
    assert not is_for_readme or path.stat().st_size <= LARGEST_BYTES


@pytest.fixture(scope="module")
def busy(share_worker: StartWorker) -> Iterator[WorkerProcess]:
    """A worker with some streams running at any time."""
    running = share_worker("--slots", "64")
    over = threading.Event()

    def load(n: int) -> None:
        while not over.wait(0.3 * n):
            with running.streaming(FOX, max_tokens=200, ignore_eos=True, seed=n) as response:
                for _ in response.iter_raw():
                    if over.wait(0.02):
                        return

    clients = [threading.Thread(target=load, args=(n,)) for n in range(4)]
    for client in clients:
        client.start()
    yield running
    over.set()
    for client in clients:
        client.join(30)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, README_WIDTH, 1440])
def test_the_status_fits(browser: Any, busy: WorkerProcess, scheme: str, width: int) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    page = context.new_page()
    page.goto(busy.base_url)
    page.wait_for_selector("#facts dd")
    # Time for the charts to fill.
    until(lambda: len(history(busy)) >= 8, lambda: "no history", seconds=180)
    page.wait_for_timeout(2500)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width == README_WIDTH:  # down to the memory map
        end = page.locator("#memory-legend").bounding_box()
        clip = {"x": 0, "y": 0, "width": width, "height": end["y"] + end["height"] + 10}
        keep(page.screenshot(full_page=True, clip=clip), f"status-{scheme}-{width}")
    else:
        keep(page.screenshot(full_page=True), f"status-{scheme}-{width}", is_for_readme=False)
    context.close()


def history(worker: WorkerProcess) -> list[float]:
    times: list[float] = worker.get("/status/history").json()["at"]
    return times


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, README_WIDTH, 1440])
def test_the_chat_fits(browser: Any, busy: WorkerProcess, scheme: str, width: int) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    chat = Chat(context.new_page(), busy.base_url)
    chat.ask("What is the capital of France?")
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= width
    is_for_readme = width == README_WIDTH
    keep(chat.page.screenshot(), f"chat-{scheme}-{width}", is_for_readme=is_for_readme)
    context.close()


def test_a_terminal(browser: Any, tmp_path: Path) -> None:
    """A start with a download, during and after it, and a plan."""
    with running_hub() as hub:
        # Nothing reads the bytes after the tensors; progress comes every 10 MB.
        hub.repos["o/r"] = Repo({"m.gguf": bundled_gguf("f32").read_bytes() + bytes(60 << 20)})
        hub.chunk_delay_seconds = 0.08
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "TERM": "xterm"}
        command = ["--model", "hf:o/r::file=m.gguf"]
        started = on_a_terminal([*installed(), *command], environment(tmp_path / "cache", env))
    frames = started.split("\r\x1b[K")
    downloads = [frame for frame in frames if frame.startswith("downloading") and "left" in frame]
    lines = re.search(r"Listening on .*\n.*\nPage at .*\nChat at .*\n", frames[-1])
    assert downloads and lines
    download = min(downloads, key=lambda frame: abs(frame.count("█") - frame.count("░")))
    planned = subprocess.run(
        [*installed(), "plan", "--slots", "256"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    shown = (
        f"$ llorch-cpu {' '.join(command)}\n{download}\n\n"
        f"   … and when it is ready:\n\n{lines[0]}\n$ llorch-cpu plan --slots 256\n{planned.stdout}"
    )
    page = browser.new_page(viewport={"width": 1100, "height": 300})
    page.set_content(TERMINAL + html.escape(shown) + "</pre>")
    expect(page.locator("pre")).to_contain_text("█")
    keep(page.locator("pre").screenshot(), "terminal")
    page.close()


def on_a_terminal(command: list[str], env: dict[str, str]) -> str:
    """Return a worker's terminal output until it serves and is stopped."""
    terminal, its_end = pty.openpty()
    process = subprocess.Popen(
        [*command, "--port", "0"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=its_end, env=env,
    )  # fmt: skip
    os.close(its_end)
    seen = bytearray()
    deadline = time.monotonic() + 120
    try:
        while b"Chat at" not in seen and time.monotonic() < deadline:
            seen += os.read(terminal, 4096)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return seen.decode().replace("\r\n", "\n")
