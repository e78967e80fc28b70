"""The make targets: which target runs each test, and what stops a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests import ROOT


def pytest_of(target: str) -> list[list[str]]:
    """Return the arguments of each pytest that `make TARGET` would start."""
    shown = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    commands = [line.split() for line in shown.splitlines() if "bin/pytest " in line]
    return [command[1:] for command in commands]


def targets() -> list[str]:
    lines = (ROOT / "Makefile").read_text("utf-8").splitlines()
    return [line.partition(":")[0] for line in lines if " ## " in line and "awk" not in line]


def test_every_long_test_is_run_by_a_make_target() -> None:
    files = [path for path in ROOT.glob("tests/**/test_*.py") if "mark.long" in path.read_text()]
    every = [str(path.relative_to(ROOT)) for path in files if path != Path(__file__)]
    assert every
    places = []
    for target in targets():
        for arguments in pytest_of(target):
            if "long" in arguments:
                places += [each for each in arguments if each.startswith("tests")]
    left = [name for name in every if not name.startswith(tuple(places))]
    assert left == []


def test_no_folder_stands_in_for_a_target(tmp_path: Path) -> None:
    for target in targets():
        (tmp_path / target).mkdir()
    command = ["make", "--dry-run", "--file", str(ROOT / "Makefile"), *targets()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "is up to date" not in done.stdout, done.stdout


def test_clean_leaves_nothing_that_was_built(tmp_path: Path) -> None:
    sources = [ROOT / "Makefile", *ROOT.glob("tools/**/*.py"), *ROOT.glob("tests/**/conftest.py")]
    venvs = {
        name for each in sources for name in re.findall(r"\.venv-\w+", each.read_text("utf-8"))
    }
    venvs |= {f".venv-{end}" for end in re.findall(r"\$\(VENV\)-(\w+)", sources[0].read_text())}
    ignored = re.findall(r"^\.\w[\w-]+(?=/$)", (ROOT / ".gitignore").read_text(), re.MULTILINE)
    assert len(venvs) > 3 and len(ignored) > 3
    for name in (".venv", "dist", *venvs, *ignored):
        (tmp_path / name).mkdir()
    # An outer make would pass on its own VENV, which must not be touched.
    environment = {name: text for name, text in os.environ.items() if "MAKE" not in name}
    command = ["make", "--file", str(ROOT / "Makefile"), "VENV=.venv", "clean"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_commits_hooks_are_what_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    entries = [hook["entry"] for repo in hooks["repos"] for hook in repo["hooks"]]
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\nlint:")[2].partition("\n\n")[0]
    lines = re.findall(r"\t\$\(VENV\)(\S+(?: [\w-]+)*)", recipe)
    assert entries == [f".venv{line}" for line in lines]


def test_a_skip_that_nobody_allowed_fails_the_run(tmp_path: Path) -> None:
    plugin = "from tests.skips import NoSkips\n"
    plugin += "def pytest_configure(config): config.pluginmanager.register(NoSkips())\n"
    (tmp_path / "conftest.py").write_text(plugin)
    (tmp_path / "test_it.py").write_text("import pytest\ndef test_it(): pytest.skip('no reason')\n")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path)]
    # The inner run has its own plugins and does not have this run's flags.
    outer_flags = {"PYTEST_ADDOPTS", "PYTEST_PLUGINS"}
    environment = {name: text for name, text in os.environ.items() if name not in outer_flags}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    assert "test_it.py::test_it" in done.stdout
    assert "tests/skips.py does not allow it" in done.stdout
