"""Additions to a CUDA toolkit. These toolkits are folders, not compilers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from builds import cuda
from builds import pins as pinned
from builds.errors import BuildError

COMPLETE = ("include/cublas_v2.h", "lib64/stubs/libcuda.so")


def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...]) -> None:
    """Make a toolkit of these files, whose nvcc reports its location like the real one."""
    root = tmp_path / "toolkit"
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho '#$ TOP={root}' >&2\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent), prepend=":")


def test_a_complete_toolkit_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit(tmp_path, monkeypatch, COMPLETE)
    assert cuda.completion(pinned.pins(), tmp_path) == ([], [])


def test_a_stub_replaces_a_missing_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit(tmp_path, monkeypatch, COMPLETE[:1])
    arguments, flags = cuda.completion(pinned.pins(), tmp_path)
    assert flags == []
    assert arguments == [f"-DCUDA_cuda_driver_LIBRARY={tmp_path}/libcuda.so"]
    shown = subprocess.run(
        ["readelf", "-d", tmp_path / "libcuda.so"], capture_output=True, text=True, check=True
    )
    assert "Library soname: [libcuda.so.1]" in shown.stdout


def test_a_plugin_linked_with_the_stub_needs_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on systems whose linker keeps only libraries that provide a used symbol."""
    toolkit(tmp_path, monkeypatch, COMPLETE[:1])
    cuda.completion(pinned.pins(), tmp_path)
    caller = tmp_path / "caller.cpp"
    caller.write_text('extern "C" int cuInit(unsigned); int call() { return cuInit(0); }')
    plugin = tmp_path / "plugin.so"
    flags = pinned.recipe("cuda").environment["LDFLAGS"]
    link = ["c++", "-Wl,--as-needed", *flags.split(), "-shared", "-fPIC", "-o", str(plugin)]
    subprocess.run([*link, str(caller), str(tmp_path / "libcuda.so")], check=True)
    shown = subprocess.run(["readelf", "-d", plugin], capture_output=True, text=True, check=True)
    assert "Shared library: [libcuda.so.1]" in shown.stdout


def test_an_nvcc_that_does_not_name_its_toolkit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit(tmp_path, monkeypatch, COMPLETE)
    (tmp_path / "bin" / "nvcc").write_text("#!/bin/sh\necho broken >&2\n")
    with pytest.raises(BuildError, match="does not say where its toolkit is: broken"):
        cuda.completion(pinned.pins(), tmp_path)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs a real nvcc")
def test_the_real_nvcc_names_itself() -> None:
    assert re.fullmatch(r"nvcc release \d+\.\d+, V[\d.]+", cuda.compiler())
