"""What the converter promises besides correct numbers: manifest, importance, progress, folders."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.disk import flock_of_nfs
from tests.unit.convert import engine
from tests.unit.convert.files import converted, write_importance
from tests.unit.convert.test_parity import checkpoint
from worker.commands import convert as cli
from worker.commands.progress import Reporter
from worker.errors import ModelError
from worker.llama import imatrix
from worker.models.gguf.header import read_header
from worker.models.scratch import Scratch

TINY = Path(__file__).parents[3] / "worker/assets/tiny-model"


def test_the_manifest_has_the_hash_of_the_source(tmp_path: Path) -> None:
    header = read_header(converted(TINY, tmp_path / "m.gguf", "--name", "Tiny"))
    files = [p for p in sorted(TINY.iterdir()) if p.suffix in (".json", ".safetensors")]
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files]
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    assert header.metadata["llorch.convert.source_sha256"] == expected
    assert header.metadata["llorch.convert.source"] == "Tiny"
    assert header.metadata["llorch.convert.outtype"] == "q8_0"
    assert header.metadata["llorch.convert.version"]
    assert header.name == "Tiny"


def test_a_name_that_llama_cpp_would_misread_is_changed(tmp_path: Path) -> None:
    source = checkpoint("phi-3", tmp_path)
    target = converted(source, tmp_path / "m.gguf", "--name", "My-Phi-3-mini")
    assert "phi-3" not in str(read_header(target).name).lower()
    model = engine.vocabulary(target)
    assert model.tokenize("hello", add_special=False, parse_special=True)
    model.close()


def test_json_lines_report_phases_and_percentages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "worker.commands.convert", str(TINY), str(tmp_path / "m.gguf")]
    done = subprocess.run(
        [*command, "--progress", "json"], capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    phases = [line["phase"] for line in lines if "phase" in line]
    assert list(dict.fromkeys(phases)) == ["check", "convert", "verify"]
    assert all(0 <= line["percent"] <= 100 for line in lines if "percent" in line)
    assert lines[-1]["result"]["size_bytes"] == (tmp_path / "m.gguf").stat().st_size


def legacy_matrix(path: Path, entries: dict[str, np.ndarray]) -> None:
    data = struct.pack("<i", len(entries))
    for name, values in entries.items():
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack("<ii", 2, len(values)) + values.astype("<f4").tobytes()
    path.write_bytes(data)


def test_importance_changes_what_is_kept(tmp_path: Path) -> None:
    weights = np.ones(256, dtype=np.float32)
    weights[:32] = 1000
    names = [f"blk.{i}.{t}.weight" for i in range(4) for t in ("ffn_gate", "ffn_up", "attn_q")]
    legacy_matrix(tmp_path / "legacy.dat", dict.fromkeys(names, weights))
    write_importance(tmp_path / "new.gguf", dict.fromkeys(names, weights), n_counted=2)
    legacy, new = imatrix.read(tmp_path / "legacy.dat"), imatrix.read(tmp_path / "new.gguf")
    assert legacy.keys() == new.keys() == set(names)
    assert all(np.array_equal(legacy[n], weights / 2) for n in names)
    assert all(np.array_equal(new[n], weights / 2) for n in names)

    plain = converted(TINY, tmp_path / "plain.gguf", "--outtype", "q4_k_m")
    flags = ("--outtype", "Q4_K_M", "--imatrix", str(tmp_path / "new.gguf"))
    weighted = converted(TINY, tmp_path / "weighted.gguf", *flags)
    assert plain.read_bytes() != weighted.read_bytes()


def test_an_invalid_importance_matrix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no matrix at all")
    legacy_matrix(tmp_path / "damaged", {"a": np.ones(3, np.float32)})
    with (tmp_path / "damaged").open("r+b") as file:
        file.seek(-16, io.SEEK_END)
        file.write(struct.pack("<i", -1))  # the number of values
    for name in ("text", "damaged"):
        with pytest.raises(ModelError, match="not an importance matrix"):
            imatrix.read(tmp_path / name)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_phase_is_reported_at_its_begin_at_its_end_and_ten_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout", stdout := io.StringIO())
    clock = iter([0.0, 100.0, 100.05, 100.5, 100.55, 102.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    report = Reporter("json")
    report.step("check", 0, 1)
    for n_bytes in (0, 1000, 2000, 3000, 4000):
        report.step("convert", n_bytes, 4000)
    lines = [json.loads(line) for line in stdout.getvalue().splitlines()]
    assert [tuple(line.values()) for line in lines] == [
        ("check", 0.0, None, 1),
        ("convert", 0.0, None, 4000),
        ("convert", 50.0, 4000, 4000),
        ("convert", 100.0, 2000, 4000),
    ]


def test_a_note_replaces_the_live_line_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    report = Reporter("bar")
    report.step("convert", 2_000_000, 4_000_000)
    report.note("done")
    _, shown, note = terminal.getvalue().split("\r\x1b[K")
    assert re.fullmatch(r"converting  █{12}░{12}  50 %  2\.0 of 4\.0 MB  \d+\.\d MB/s", shown)
    assert note == "note: done\n"


@pytest.mark.parametrize("style", ["bar", "json"])
def test_every_result_comes_after_the_progress(
    style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a line of its own, even if a progress bar is on the same terminal, and as the last line of
    JSON."""
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    monkeypatch.setattr("sys.stderr", terminal)
    file, adapter = str(tmp_path / "m.gguf"), Path(__file__).parents[2] / "data/adapter"
    for command, words in (
        (["convert", str(TINY), file], "wrote "),
        (["verify", str(TINY), file], f"{file} matches its source: 38 tensors agree"),
        (["adapter", str(adapter), file, str(tmp_path / "a.gguf")], "adapts 24 weights"),
    ):
        assert cli.run([*command, "--progress", style]) == 0
        last = terminal.getvalue().splitlines()[-1].removeprefix("\x1b[K")
        if style == "json":
            assert json.loads(last)["result"]["path"].endswith(".gguf")
        else:
            assert last.startswith((words, str(tmp_path))) and words in last


def test_a_file_gets_no_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", file := io.StringIO())
    Reporter("bar").step("convert", 1, 2)
    assert file.getvalue() == ""


HOLDS = "import sys, pathlib; from worker.models.scratch import Scratch; "
HOLDS += "Scratch(pathlib.Path(sys.argv[1])); print(flush=True); sys.stdin.read()"


def test_folders_of_a_killed_process_are_removed_by_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    living, killed = (subprocess.Popen(command, **pipes) for _ in range(2))  # type: ignore[call-overload]
    for child in (living, killed):
        child.stdout.readline()
    folders = [each for each in tmp_path.iterdir() if each.is_dir()]
    (folders[0] / "large").write_bytes(b"1")
    assert len(folders) == 2
    killed.kill()
    killed.communicate()
    with Scratch(tmp_path) as mine:
        assert len(list(tmp_path.iterdir())) == 4 and mine.is_dir(), "each with its lock"
    assert len(list(tmp_path.iterdir())) == 2
    living.communicate()


KILLED = """
import os, sys
from worker.commands import convert
from worker.convert import verify
from worker.convert.tokenizer import check
{}.write_layout = lambda *_, **__: os.kill(os.getpid(), 9)
convert.run(sys.argv[1:])
"""


@pytest.mark.parametrize(("module", "command"), [("check", "convert"), ("verify", "verify")])
def test_files_of_a_killed_command_are_removed_by_the_next(
    module: str, command: str, tmp_path: Path
) -> None:
    file, folder = tmp_path / "m.gguf", tmp_path / "temporary"
    folder.mkdir()
    if command == "verify":
        converted(TINY, file)
    environment = {**os.environ, "TMPDIR": str(folder)}
    arguments = [command, str(TINY), str(file), "--progress", "none"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED.format(module), *arguments], env=environment
    )
    assert killed.returncode == -signal.SIGKILL and len(list(folder.iterdir())) == 2
    next_one = [sys.executable, "-m", "worker.commands.convert", *arguments]
    subprocess.run(next_one, env=environment, check=True)
    assert list(folder.iterdir()) == []


def test_a_folder_on_nfs_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", flock_of_nfs)
    with Scratch(tmp_path) as first, Scratch(tmp_path) as second:
        assert first != second and first.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_if_no_folder_can_be_locked_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_file: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(OSError, match=r"no file locks \(No locks available\)"):
        Scratch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_if_no_temporary_file_can_be_written_the_variable_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    with pytest.raises(OSError, match="set TMPDIR"):
        Scratch(None)


def test_a_missing_parent_is_replaced_by_the_next_above_it(tmp_path: Path) -> None:
    with Scratch(tmp_path / "not/there") as mine:
        assert mine.parent == tmp_path
    assert list(tmp_path.iterdir()) == []
