"""`make setup`: quick if nothing changed, a message if the machine lacks something."""

import importlib.util
import json
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from builds import environment, locks, pins, toolchain
from builds.environment import STAMP
from builds.errors import BuildError
from tests import ROOT


def own_venv() -> Path:
    """The venv that `make setup` made for this checkout; others must not be changed."""
    stamp = Path(sys.prefix, STAMP)
    if not stamp.exists() or json.loads(stamp.read_text())["root"] != str(ROOT):
        pytest.skip("these tests run outside the venv that `make setup` makes here")
    return Path(sys.prefix)


def test_a_second_setup_does_nothing() -> None:
    own = own_venv()
    for how in ([], ["--to-run"]):
        command = [sys.executable, "-m", "builds", "setup", *how, "--venv", str(own)]
        first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert first.returncode == 0, first.stderr
        before = (own / STAMP).stat().st_mtime_ns
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (second.returncode, second.stderr) == (0, "")
        assert (own / STAMP).stat().st_mtime_ns == before


@pytest.mark.parametrize("native", [False, True])
def test_a_venv_with_more_than_a_run_needs_is_unchanged(tmp_path: Path, native: bool) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    recipe = pins.recipe("cpu", native=native)
    stamp = json.dumps(environment._wanted(recipe, pins.pins(), locks.TEST))
    (tmp_path / STAMP).write_text(stamp)
    assert environment.setup(tmp_path, "cpu", to_run=True) == python
    assert (tmp_path / STAMP).read_text() == stamp


def test_the_test_plugin_is_in_the_venv() -> None:
    assert (own_venv() / "test-plugins" / "libggml-rpc.so").is_file()


def test_bytecode_is_written_despite_pythondontwritebytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "module.py"
    module.write_text("x = 1\n")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    toolchain.compile_bytecode(Path(sys.executable), tmp_path)
    assert Path(importlib.util.cache_from_source(str(module))).is_file()


def test_a_package_with_another_hash_is_not_installed(tmp_path: Path) -> None:
    locked = locks.RUNTIME.read_text()
    (own,) = re.findall(r"(?:^|\n)(h11==.*?)(?=\n[a-z])", locked, re.DOTALL)
    lock = tmp_path / "lock.txt"
    lock.write_text(re.sub("sha256:[0-9a-f]{64}", "sha256:" + "0" * 64, own) + "\n")
    home = tmp_path / "venv"
    venv.create(home, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "pip").symlink_to(Path(sysconfig.get_path("purelib"), "pip"))
    python = home / "bin/python"
    with pytest.raises(BuildError, match="DO NOT MATCH THE HASHES"):
        toolchain.install(python, lock)
    lock.write_text(own + "\n")
    toolchain.install(python, lock)
    assert (packages / "h11").is_dir()


def test_the_sbom_lists_what_a_venv_really_holds() -> None:
    command = [sys.executable, "-m", "builds", "sbom", sys.prefix]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {(each["name"], each["version"]) for each in json.loads(done.stdout)["components"]}
    command = [sys.executable, "-m", "pip", "list", "--format=json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {(each["name"], each["version"]) for each in json.loads(shown)} <= listed
    assert "llama.cpp" in {name for name, _ in listed}


@pytest.mark.parametrize(
    ("code", "sentences"),
    [
        pytest.param(
            "import runpy, sys; sys.version_info = (3, 9, 2, 'final', 0);"
            "runpy.run_module('builds', run_name='__main__')",
            ["Python 3.11 or newer is needed, and "],
            id="old Python",
        ),
        pytest.param(
            "import sys; sys.modules['ensurepip'] = None; from builds.cli import main;"
            "sys.exit(main(['setup', '--venv', FOLDER + '/venv']))",
            ["apt-get install python3-venv"],
            id="no ensurepip",
        ),
        pytest.param(
            "import os, sys; os.environ['CXX'] = 'no-such-compiler'; from builds.cli import main;"
            "sys.exit(main(['cpu']))",
            ["No C++ compiler found (looked for no-such-compiler)", "apt-get install g++"],
            id="no compiler",
        ),
        pytest.param(
            "import os, shutil, sys; from builds import cuda; from builds.cli import main;"
            "os.symlink(shutil.which('c++'), FOLDER + '/c++');"
            "os.environ['PATH'] = FOLDER; sys.exit(main(['cuda']))",
            ["No nvcc found"],
            id="no nvcc",
        ),
    ],
)
def test_what_the_machine_lacks_is_reported(
    code: str, sentences: list[str], tmp_path: Path, private_cache: Path
) -> None:
    command = [sys.executable, "-c", f"FOLDER = {str(tmp_path)!r}; {code}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert all(sentence in result.stderr for sentence in sentences), result.stderr
