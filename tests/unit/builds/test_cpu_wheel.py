"""The CPU wheel that this checkout really runs on."""

import base64
import csv
import hashlib
import io
import platform
import re
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from builds import pins as pinned
from builds import sdist, smoke, store, wheels

VARIANTS = {
    "x86_64": {"x64", "sse42", "haswell", "skylakex", "zen4", "sapphirerapids"},
    "aarch64": {"armv8.0_1", "armv8.2_1"},
}


def test_the_wheel_has_no_stray_files(cpu_wheel_files: dict[str, bytes]) -> None:
    allowed = ("llama_cpp/*", f"llama_cpp_python-{pinned.pins().version}+cpu.dist-info/*")
    stray = [name for name in cpu_wheel_files if not any(fnmatch(name, one) for one in allowed)]
    assert stray == []


def test_no_library_is_there_twice(cpu_wheel_files: dict[str, bytes]) -> None:
    libraries = {name: data for name, data in cpu_wheel_files.items() if ".so" in name}
    hashes = [hashlib.sha256(data).hexdigest() for data in libraries.values()]
    assert len(set(hashes)) == len(hashes)


def test_every_cpu_variant_is_where_the_worker_looks(cpu_wheel_files: dict[str, bytes]) -> None:
    prefix, suffix = "llama_cpp/lib/libggml-cpu-", ".so"
    found = {
        name.removeprefix(prefix).removesuffix(suffix)
        for name in cpu_wheel_files
        if name.startswith(prefix)
    }
    assert VARIANTS[platform.machine()] <= found


def test_the_rpc_device_is_for_tests_only(
    cpu_wheel: Path, cpu_wheel_files: dict[str, bytes]
) -> None:
    assert not [name for name in cpu_wheel_files if "rpc" in name]
    assert [path.name for path in cpu_wheel.parent.glob("test-plugins/*")] == ["libggml-rpc.so"]


def test_the_record_is_whole_and_right(cpu_wheel_files: dict[str, bytes]) -> None:
    (record,) = [name for name in cpu_wheel_files if name.endswith("/RECORD")]
    listed = {}
    for name, digest, size in csv.reader(io.StringIO(cpu_wheel_files[record].decode())):
        listed[name] = (digest, size)
    assert listed.keys() == cpu_wheel_files.keys()
    assert listed.pop(record) == ("", "")
    for name, (digest, size) in listed.items():
        data = cpu_wheel_files[name]
        expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={expected}", str(len(data)))


def test_entries_are_sorted_and_carry_no_date(cpu_wheel: Path) -> None:
    with zipfile.ZipFile(cpu_wheel) as archive:
        entries = archive.infolist()
    names = [entry.filename for entry in entries if not entry.filename.endswith("/RECORD")]
    assert names == sorted(names)
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}


def test_the_wheel_has_no_path_of_the_building_machine(cpu_wheel_files: dict[str, bytes]) -> None:
    traces = (b"/llorch-build-", str(Path.home()).encode() + b"/.cache")
    assert not [
        name for name, data in cpu_wheel_files.items() if any(trace in data for trace in traces)
    ]


def test_the_stamp_is_true_of_the_binaries(
    cpu_stamp: dict[str, Any], cpu_wheel_files: dict[str, bytes], tmp_path: Path
) -> None:
    """Compared with the compiler's marks in the library and with the archive itself."""
    library = tmp_path / "libllama.so"
    library.write_bytes(cpu_wheel_files["llama_cpp/lib/libllama.so"])
    shown = subprocess.run(
        ["readelf", "--string-dump=.comment", library], capture_output=True, text=True, check=True
    ).stdout
    version = re.search(r"\d+\.\d+\.\d+\s*$", shown, re.M)
    assert version is not None and cpu_stamp["compiler"].endswith(version[0].strip())

    archive = sdist.fetch(pinned.pins())
    assert cpu_stamp["sdist_sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    head = "*/.git/modules/vendor/llama.cpp/HEAD"
    found = subprocess.run(
        ["tar", "--extract", "--to-stdout", f"--file={archive}", "--wildcards", head],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert cpu_stamp["llama_cpp_commit"] == found.strip()
    (metadata,) = [data for name, data in cpu_wheel_files.items() if name.endswith("/METADATA")]
    assert f"\nVersion: {cpu_stamp['llama_cpp_python']}+cpu\n" in metadata.decode()


def test_libraries_look_for_others_beside_themselves(
    cpu_wheel_files: dict[str, bytes], tmp_path: Path
) -> None:
    for name, data in cpu_wheel_files.items():
        if ".so" in name:
            library = tmp_path / Path(name).name
            library.write_bytes(data)
            shown = subprocess.run(
                ["readelf", "--dynamic", library], capture_output=True, text=True, check=True
            ).stdout
            found = re.findall(r"(?:RUNPATH|RPATH)\).*\[(.*)\]", shown)
            assert set(found) <= {"$ORIGIN"}, name


def test_sha256sums_names_the_wheel(cpu_wheel: Path, tmp_path: Path) -> None:
    exported = wheels.export(cpu_wheel, tmp_path / "dist")
    digest, name = (tmp_path / "dist" / "SHA256SUMS").read_text().split()
    assert name == exported.name
    assert digest == hashlib.sha256(exported.read_bytes()).hexdigest()
    assert sorted(path.name for path in exported.parent.iterdir()) == sorted([name, "SHA256SUMS"])


def test_a_damaged_build_is_not_taken_from_the_cache(cpu_wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    exported = wheels.export(cpu_wheel, home)
    assert store.is_whole(home)
    exported.write_bytes(exported.read_bytes()[:-1])
    assert not store.is_whole(home)


def test_the_wheel_lists_its_devices_and_decodes_a_token(tiny_gguf: Path) -> None:
    report = smoke.run_child(Path(sys.executable), tiny_gguf)
    assert [device["name"] for device in report["devices"]] == ["CPU"]
    assert report["decoded"]["tokens"] == 1
    assert report["decoded"]["text"]
    assert [name for name in report["plugins_loaded"] if name.startswith("libggml-cpu")]


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("model") / "tiny.gguf"
    smoke.convert_bundled(Path(sys.executable), target)
    return target
