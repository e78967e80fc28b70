"""`pip install llorch-worker` from a user's view: without llama.cpp's wheel, then with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from builds import environment, pins, toolchain

INSTALLED = ("llama_cpp", "_llorch", "llorch_worker", "worker")
"""Files that pip writes, which must not go through a link into this environment."""
OF_THE_TESTS = ("kubernetes_validate", "anthropic", "openai", "mypy", "schemathesis")
"""Packages that a worker never imports, which have three quarters of all files."""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the worker's wheel and everything except the
    engine's."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.EnvBuilder(with_pip=False).create(folder / "venv")
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if each.is_dir() and not each.name.startswith((*INSTALLED, *OF_THE_TESTS)):
            shutil.copytree(each, site / each.name, copy_function=linked)
        elif each.is_file() and not each.name.startswith(INSTALLED):
            linked(each, site / each.name)
    wheel = toolchain.packed(pins.pins(), environment.ROOT, folder / "dist")
    assert run(folder / "venv/bin/python", "-m", "pip", "install", "--no-deps", str(wheel))[0] == 0
    return folder / "venv/bin"


def linked(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)


def run(*command: str | Path) -> tuple[int, str]:
    inherited = {"PYTHONPATH", "VIRTUAL_ENV"}
    environment = {name: text for name, text in os.environ.items() if name not in inherited}
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_without_the_engine_each_command_names_the_one_that_gets_it(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hint = "llorch-worker install-engine cpu"
    for command in ((fresh / "llorch-cpu", "--port", "0"), (fresh / "llorch-cpu", "plan")):
        code, output = run(*command)
        assert code == 4 and hint in output and "Traceback" not in output, output
    code, output = run(fresh / "llorch-cpu", "doctor", "--port", "0")
    assert code == 4 and hint in output, output
    assert not list(tmp_path.iterdir())
    assert run(fresh / "llorch-cpu", "--version")[0] == 0
    code, output = run(fresh / "llorch-worker")
    assert code == 2 and "required: COMMAND" in output, output


def test_one_command_installs_the_engine_that_the_tests_have(fresh: Path) -> None:
    """Here it comes from the cache, because `make setup` has built it."""
    code, output = run(fresh / "llorch-worker", "install-engine", "cpu")
    assert code == 0 and "llorch-cpu" in output, output
    code, output = run(fresh / "llorch-cpu", "doctor", "--json", "--port", "0")
    assert code == 0, output
    assert f'"{pins.pins().llama_cpp_commit}"' in output
