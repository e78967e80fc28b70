"""`python -m tools.clients`: runs all actions on a worker for each model, and counts successes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.support.bundled import bundled_gguf
from tests.support.worker import WorkerProcess
from tools.bench.model import instruct
from tools.environments import python_with

HERE = Path(__file__).parent
ENVIRONMENTS = {
    "main": (
        "openai_python", "openai_routes", "anthropic_python", "frameworks", "bodies",
        "llm_command", "outlines_python", "lm_eval_harness", "pydantic_ai_python",
    ),
    "instructor": ("instructor_python",),
    "llama_index": ("llama_index_python", "guidellm_command"),
    "aider": ("aider_command",),
    "ollama": ("ollama_python",),
}  # fmt: skip
"""The modules of actions, by the environment of their clients (see `requirements/`)."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.clients")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-clients")
    parser.add_argument("--only", default="", help="clients or actions whose name contains this")
    parser.add_argument("--url", help="URL of a running server with SmolLM2")
    parser.add_argument("--failures", action="store_true", help="list failures and their reasons")
    given = parser.parse_args()
    pythons = {
        name: python_with(HERE / "requirements" / f"{name}.txt", given.venv / name)
        for name in ENVIRONMENTS
    }
    node = clients_node(given.venv / "node")
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in ("instruct", "bundled", "exact"):
            if given.url is not None and model != "instruct":
                continue
            with served(model, Path(scratch), given.url) as url:
                flags = ["--url", url, "--model", model, "--only", given.only]
                for name, python in pythons.items():
                    modules = ["--modules", *ENVIRONMENTS[name]]
                    results += run([str(python), "-m", "tools.clients.run", *flags, *modules])
                if node is not None:
                    results += run(["node", str(node), url, model, given.only])
    report(results, show_failures=given.failures)
    return 0


def clients_node(folder: Path) -> Path | None:
    """The runner of the clients for Node, in a folder with its npm packages; None without Node."""
    if shutil.which("npm") is None:
        print("npm is not installed: the clients for Node are left out", file=sys.stderr)
        return None
    source, stamp = HERE / "node", folder / "installed.json"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    wanted = (source / "package.json").read_text("utf-8")
    if not stamp.exists() or stamp.read_text("utf-8") != wanted:
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-package-lock"]
        subprocess.run(npm, check=True, cwd=folder)
        stamp.write_text(wanted, "utf-8")
    return folder / "run.mjs"


@contextmanager
def served(model: str, scratch: Path, url: str | None) -> Iterator[str]:
    """Run a worker with default settings on that model; yields its URL."""
    if url is not None:
        yield url
        return
    flags = ["--speculate", "auto"]
    if model == "instruct":
        flags += ["--model", str(instruct())]
    if model == "exact":
        single = ["--kv-type", "f32", "--flash-attention", "off"]
        flags += ["--model", str(bundled_gguf("f32")), "--served-model-name", "tiny", *single]
    worker = WorkerProcess.start(*flags, folder=scratch / model, cache_dir=scratch / "cache")
    try:
        yield worker.base_url
    finally:
        worker.kill()


def run(command: list[str]) -> list[dict[str, Any]]:
    """Return the outcomes of the actions, which the runner prints one per line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "*"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env=environment, cwd=ROOT, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        results = []
        for line in child.stdout:
            if line.startswith("{"):
                results.append(json.loads(line))
                mark = "." if results[-1]["fault"] is None else "x"
                print(mark, end="", file=sys.stderr, flush=True)
    if child.returncode != 0:
        raise SystemExit(f"the clients' runner ended with {child.returncode}")
    return results


def report(results: list[dict[str, Any]], *, show_failures: bool) -> None:
    print(file=sys.stderr)
    for client in dict.fromkeys(result["client"] for result in results):
        mine = [result for result in results if result["client"] == client]
        worked = sum(result["fault"] is None for result in mine)
        print(f"{client:<16} {worked:>4} of {len(mine):>4}")
    worked = sum(result["fault"] is None for result in results)
    print(f"{'all':<16} {worked:>4} of {len(results):>4}")
    for result in results if show_failures else ():
        if result["fault"] is not None:
            print(f"  {result['client']}: {result['name']}\n      {result['fault']}")


if __name__ == "__main__":
    sys.exit(main())
