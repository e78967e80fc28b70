"""From a wheel in upstream's layout to one in ours."""

import ctypes
import json
import re
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from builds import repack
from builds.errors import BuildError
from builds.pins import Recipe

INFO = "llama_cpp_python-1.2.3.dist-info"
UPSTREAM = {
    "bin/libggml-cpu-x64.so": b"x64",
    "bin/libggml-cpu-haswell.so": b"haswell",
    "bin/libggml-cpu-armv8.2_1.so": b"neoverse",
    "bin/libggml-rpc.so": b"rpc",
    "bin/libggml-blas.so": b"blas",
    "include/ggml.h": b"header",
    "lib/cmake/ggml/ggml-config.cmake": b"cmake",
    "lib/libggml.so": b"ggml",
    "lib/libllama-common.so.0": b"common",
    "llama_cpp/__init__.py": b"version",
    "llama_cpp/lib/libggml-base.so": b"base",
    "llama_cpp/lib/libggml-base.so.0": b"base",
    "llama_cpp/lib/libggml-base.so.0.25.3": b"base",
    "llama_cpp/lib/libggml-rpc.so": b"rpc",
    "llama_cpp/lib/libggml.so": b"ggml",
    "llama_cpp/lib/libggml.so.0": b"ggml",
    "llama_cpp/lib/libggml.so.0.25.3": b"ggml",
    "llama_cpp/lib/libllama.so": b"llama",
    "llama_cpp/lib/libllama.so.0": b"llama",
    "llama_cpp/lib/libllama.so.0.5.0": b"llama",
    "llama_cpp/lib/libmtmd.so": b"mtmd",
    "llama_cpp/lib/libmtmd.so.0": b"mtmd",
    "llama_cpp/lib/libmtmd.so.0.5.0": b"mtmd",
    f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: 1.2.3\n",
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-linux_x86_64\n",
    f"{INFO}/licenses/LICENSE.md": b"MIT",
    f"{INFO}/RECORD": b"",
}
RECIPE = Recipe("cpu", cmake={}, ship=("libggml-cpu-*.so",), test=("libggml-rpc.so",))


def repacked(
    folder: Path,
    patchelf: Path,
    recipe: Recipe = RECIPE,
    files: dict[str, bytes] = UPSTREAM,
) -> Path:
    out = folder / "out"
    out.mkdir(parents=True)
    upstream = folder / "llama_cpp_python-1.2.3-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(upstream, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    stamp, licenses = {"backend": "cpu"}, {"OTHER": b"MIT too"}
    scripts = {"convert_hf_to_gguf.py": b"convert"}
    wheel, _ = repack.repack(upstream, recipe, stamp, licenses, scripts, out, patchelf)
    return wheel


def without(part: str) -> dict[str, bytes]:
    return {name: data for name, data in UPSTREAM.items() if part not in name}


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_a_wheel_keeps_each_needed_file_once(tmp_path: Path, patchelf: Path) -> None:
    wheel = repacked(tmp_path, patchelf)
    info = "llama_cpp_python-1.2.3+cpu.dist-info"
    assert wheel.name == "llama_cpp_python-1.2.3+cpu-py3-none-linux_x86_64.whl"
    assert names(wheel) == {
        "llama_cpp/__init__.py",
        "llama_cpp/converter/convert_hf_to_gguf.py",
        "llama_cpp/lib/libllama.so",
        "llama_cpp/lib/libmtmd.so",
        "llama_cpp/lib/libggml.so.0",
        "llama_cpp/lib/libggml-base.so.0",
        "llama_cpp/lib/libggml-cpu-x64.so",
        "llama_cpp/lib/libggml-cpu-haswell.so",
        "llama_cpp/lib/libggml-cpu-armv8.2_1.so",
        "llama_cpp/lib/llorch-build.json",
        f"{info}/METADATA",
        f"{info}/WHEEL",
        f"{info}/licenses/LICENSE.md",
        f"{info}/licenses/OTHER",
        f"{info}/RECORD",
    }


def test_the_version_gets_its_local_part_and_the_stamp_its_plugins(
    tmp_path: Path, patchelf: Path
) -> None:
    wheel = repacked(tmp_path, patchelf)
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("llama_cpp_python-1.2.3+cpu.dist-info/METADATA")
        stamp = json.loads(archive.read(repack.STAMP))
    assert b"\nVersion: 1.2.3+cpu\n" in metadata
    assert stamp["backend"] == "cpu"
    plugins = [f"libggml-cpu-{each}.so" for each in ("armv8.2_1", "haswell", "x64")]
    assert stamp["plugins"] == plugins


def test_the_test_plugin_lies_beside_the_wheel(tmp_path: Path, patchelf: Path) -> None:
    wheel = repacked(tmp_path, patchelf)
    assert (wheel.parent / "test-plugins" / "libggml-rpc.so").read_bytes() == b"rpc"


def test_an_optional_plugin_is_out_of_the_scan(tmp_path: Path, patchelf: Path) -> None:
    wheel = repacked(tmp_path, patchelf, replace(RECIPE, optional=("libggml-blas.so",)))
    assert "llama_cpp/lib/optional/libggml-blas.so" in names(wheel)
    assert "llama_cpp/lib/libggml-blas.so" not in names(wheel)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, patchelf: Path) -> None:
    first, second = (repacked(tmp_path / name, patchelf) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_a_plugin_that_was_not_built_stops_the_build(tmp_path: Path, patchelf: Path) -> None:
    with pytest.raises(BuildError, match=r"made no libggml-cpu-\*\.so, which cpu\.toml wants"):
        repacked(tmp_path, patchelf, files=without("libggml-cpu"))


def test_a_missing_library_stops_the_build(tmp_path: Path, patchelf: Path) -> None:
    with pytest.raises(BuildError, match="has no libggml-base"):
        repacked(tmp_path, patchelf, files=without("libggml-base"))


def test_macos_names_are_understood(tmp_path: Path, patchelf: Path) -> None:
    """There the version is before the suffix."""
    files = {}
    for name, data in UPSTREAM.items():
        stem, dot, version = name.partition(".so.")
        if name.startswith("llama_cpp/lib/") and "rpc" not in name:
            name = f"{stem}.{version}.dylib" if dot else name.replace(".so", ".dylib")
        files[name] = data
    wheel = repacked(tmp_path, patchelf, files=files)
    libraries = {name for name in names(wheel) if name.endswith(".dylib")}
    assert libraries == {
        "llama_cpp/lib/libllama.dylib",
        "llama_cpp/lib/libmtmd.dylib",
        "llama_cpp/lib/libggml.0.dylib",
        "llama_cpp/lib/libggml-base.0.dylib",
    }


def test_a_library_looks_for_others_beside_itself_and_nowhere_else(
    tmp_path: Path, patchelf: Path
) -> None:
    """Although CMake told the linker about a toolkit in somebody's home."""
    plugin = tmp_path / "plugin.so"
    run_paths = "-Wl,-rpath,$ORIGIN:/home/somebody/toolkit"
    command = ["c++", "-shared", run_paths, "-o", str(plugin), "-x", "c++", "/dev/null"]
    subprocess.run(command, check=True)
    assert run_path(plugin) == "$ORIGIN:/home/somebody/toolkit"
    name = "libggml-cpu-x64.so"
    files = UPSTREAM | {f"bin/{name}": plugin.read_bytes()}
    with zipfile.ZipFile(repacked(tmp_path, patchelf, files=files)) as archive:
        shipped = Path(archive.extract(f"llama_cpp/lib/{name}", tmp_path))
    assert run_path(shipped) == "$ORIGIN"
    assert b"somebody" not in shipped.read_bytes()
    ctypes.CDLL(str(shipped))


def run_path(library: Path) -> str:
    shown = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    found = re.search(r"(?:RUNPATH|RPATH)\).*\[(.*)\]", shown.stdout)
    assert found is not None
    return found[1]
