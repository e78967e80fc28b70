"""`python -m tools.clients.llama_server_suite`: llama-server's own tests, run against the worker.

The tests are in the pinned sdist; none are copied here. Their models are on a hub: `--models` names
a folder with some of them (files are named as on the hub, with folders joined by `-`), and the
bundled model replaces the others, so tests that expect their text fail.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from builds import sdist
from builds.pins import pins
from tests import ROOT
from tests.support.ports import free_port
from tools.environments import python_with


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.clients.llama_server_suite")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-clients" / "llama-server")
    parser.add_argument("--models", type=Path, default=Path("/nonexistent"))
    parser.add_argument(
        "--only", default="", help="only tests that match this expression (pytest -k)"
    )
    parser.add_argument("--failures", action="store_true", help="list failures and their reasons")
    given = parser.parse_args()
    source = sdist.unpacked(pins()) / "vendor/llama.cpp"
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tests = copied(source, scratch)
        python = python_with(tests / "requirements.txt", given.venv)
        report = scratch / "report.xml"
        command = [str(python), "-m", "pytest", "-m", "not slow", "-k", given.only]
        command += ["-p", "no:cacheprovider", "--timeout", "120", f"--junitxml={report}", "unit"]
        binary = launcher(scratch, given.models.absolute())
        subprocess.run(
            command, cwd=tests,
            env={**os.environ, "LLAMA_SERVER_BIN_PATH": str(binary), "PORT": str(free_port())},
            stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        count(report, show_failures=given.failures)
    return 0


def copied(source: Path, scratch: Path) -> Path:
    """Copy the suite to a writable place, with the files that it reads by relative paths."""
    tests = scratch / "tools/server/tests"
    shutil.copytree(source / "tools/server/tests", tests)
    (scratch / "models").symlink_to(source / "models")
    # The worker's port answers during the load; only /ready says whether it accepts work.
    _change(tests / "utils.py", '"GET", "/health", headers', '"GET", "/ready", headers')
    with (tests / "requirements.txt").open("a", encoding="utf-8") as requirements:
        requirements.write("\npytest-timeout\n")
    # There is nothing to download, so the models need not all be started once.
    _change(tests / "conftest.py", "ServerPreset.load_all()", "pass")
    return tests


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text, (path, old)
    path.write_text(text.replace(old, new), "utf-8")


def launcher(scratch: Path, models: Path) -> Path:
    path = scratch / "llama-server"
    (scratch / "models-served").mkdir()
    module = f"{sys.executable} -m tools.clients.llama_server_launcher"
    lines = ("#!/bin/sh", f'PYTHONPATH={ROOT} exec {module} {models} {scratch} "$@"')
    path.write_text("\n".join(lines) + "\n", "utf-8")
    path.chmod(0o755)
    return path


def count(report: Path, *, show_failures: bool) -> None:
    passed, ran, faults = Counter[str](), Counter[str](), list[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("classname", "").rpartition(".")[2]
        if case.find("skipped") is not None:
            continue
        ran[name] += 1
        fault = next((f for f in (case.find("failure"), case.find("error")) if f is not None), None)
        if fault is None:
            passed[name] += 1
        else:
            why = " ".join((fault.get("message") or "").split())[:200]
            faults.append(f"  {name}: {case.get('name')}\n      {why}")
    for name, n_ran in ran.items():
        print(f"{name:<28} {passed[name]:>4} of {n_ran:>4}")
    print(f"{'all':<28} {passed.total():>4} of {ran.total():>4}")
    print(*(faults if show_failures else ()), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
