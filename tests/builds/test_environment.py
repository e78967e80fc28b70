"""`make setup`: quick when nothing changed, a sentence when the machine lacks something."""

import subprocess
import sys
from pathlib import Path

import pytest

from builds.environment import STAMP
from builds.pins import FOLDER

ROOT = FOLDER.parent


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_second_setup_does_nothing() -> None:
    venv = Path(sys.prefix)
    if not (venv / STAMP).exists():
        pytest.skip("these tests run outside the venv that `make setup` makes")
    command = [sys.executable, "-m", "builds", "setup", "--venv", str(venv)]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    before = (venv / STAMP).stat().st_mtime_ns
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (second.returncode, second.stderr) == (0, "")
    assert (venv / STAMP).stat().st_mtime_ns == before


def test_the_test_plugin_is_in_the_venv() -> None:
    venv = Path(sys.prefix)
    if not (venv / STAMP).exists():
        pytest.skip("these tests run outside the venv that `make setup` makes")
    assert (venv / "test-plugins" / "libggml-rpc.so").is_file()


def test_an_old_python_gets_a_sentence() -> None:
    result = python(
        "import runpy, sys; sys.version_info = (3, 9, 2, 'final', 0);"
        "runpy.run_module('builds', run_name='__main__')"
    )
    assert result.returncode == 1
    assert result.stderr.startswith("Python 3.11 or newer is needed, and ")
    assert "Traceback" not in result.stderr


def test_a_missing_ensurepip_gets_a_sentence(tmp_path: Path, private_cache: Path) -> None:
    target = tmp_path / "venv"
    result = python(
        "import sys; sys.modules['ensurepip'] = None; from builds.cli import main;"
        f"sys.exit(main(['setup', '--venv', {str(target)!r}]))"
    )
    assert result.returncode == 1
    assert "apt-get install python3-venv" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_compiler_gets_a_sentence(
    tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = python("import sys; from builds.cli import main; sys.exit(main(['cpu']))")
    assert result.returncode == 1
    assert "No C++ compiler found (looked for no-such-compiler)" in result.stderr
    assert "apt-get install g++" in result.stderr


def test_a_missing_nvcc_gets_a_sentence(private_cache: Path, tmp_path: Path) -> None:
    result = python(
        "import shutil, sys; from builds import cuda; from builds.cli import main;"
        f"import os; c = shutil.which('c++'); os.symlink(c, {str(tmp_path / 'c++')!r});"
        f"os.environ['PATH'] = {str(tmp_path)!r}; sys.exit(main(['cuda']))"
    )
    assert result.returncode == 1
    assert "No nvcc found" in result.stderr
    assert "Traceback" not in result.stderr
