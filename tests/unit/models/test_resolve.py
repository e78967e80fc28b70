"""From a reference to a checked GGUF on this machine, with the real converter if needed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest

from tests import ROOT
from tests.support.samples import write_gguf, write_split
from tests.unit.convert.check_here import CheckHere
from worker import installation
from worker.commands.progress import Reporter
from worker.convert import prepare
from worker.convert.convert import convert
from worker.convert.output_types import FORMATS
from worker.convert.prepare import Options
from worker.errors import BackendMismatch, ConfigError, ModelError, WorkerError, rebuild_error
from worker.installation import default_cache_dir
from worker.models import checksum, conversion
from worker.models.checksum import sha256_of_file, write_whole
from worker.models.gguf.header import read_header
from worker.models.resolve import ResolvedModel, bundled_folder, resolve
from worker.settings import Settings
from worker.wire.messages import Progress


def resolved(ref: str | None, cache: Path, outtype: str = "q8_0") -> ResolvedModel:
    settings = Settings.load("cpu", {"cache_dir": cache, "outtype": outtype})
    return asyncio.run(resolve(settings, ref))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the bundled checkpoint that a test may damage."""
    return Path(shutil.copytree(bundled_folder(), tmp_path / "checkpoint"))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with such a checkpoint's conversion, whose key is its content and name."""
    folder = tmp_path_factory.mktemp("converted")
    resolved(str(shutil.copytree(bundled_folder(), folder / "checkpoint")), folder / "cache")
    return folder / "cache"


@pytest.fixture
def converted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the cache: a conversion without a child takes a quarter of the time."""

    async def run(arguments: Sequence[str], on_progress: Callable[[Progress], None]) -> None:
        on_progress(Progress("convert", 50.0))
        source, written, _, outtype, _, name = arguments
        options = Options(outtype=outtype, name=name)
        convert(Path(source), Path(written), options, Reporter("none"))

    monkeypatch.setattr(conversion, "_run_converter", run)
    monkeypatch.setattr(prepare, "TokenCheck", CheckHere)


@pytest.fixture
def cache(tmp_path: Path, converted: Path, converted_here: None) -> Path:
    """Return a copy of that cache."""
    return Path(shutil.copytree(converted, tmp_path / "cache"))


def test_without_a_reference_the_bundled_model_is_resolved(tmp_path: Path) -> None:
    reports: list[Progress] = []
    found = asyncio.run(resolve(Settings(cache_dir=tmp_path), None, reports.append))
    assert (found.model_ref, found.kind) == ("tiny-model", "bundled")
    header = read_header(found.gguf_path)
    assert (header.architecture, header.quant_kind, header.vocab_size) == ("llama", "Q8_0", 1024)
    assert "convert" in {progress.phase for progress in reports}
    assert all(0 <= progress.percent <= 100 for progress in reports)
    assert resolved("tiny-model", tmp_path) == found


def test_the_second_start_reuses_what_the_first_converted(
    tmp_path: Path, checkpoint: Path, cache: Path
) -> None:
    (first,) = cache.glob("converted/*/model-q8_0.gguf")
    stamp = first.stat().st_mtime_ns
    reports: list[Progress] = []
    again = asyncio.run(resolve(Settings(cache_dir=cache), str(checkpoint), reports.append))
    assert again.gguf_path == first and first.stat().st_mtime_ns == stamp
    assert "convert" not in {progress.phase for progress in reports}
    assert (again.model_ref, again.kind) == (str(checkpoint), "safetensors")
    moved = checkpoint.rename(tmp_path / "elsewhere")
    other = resolved(str(moved), cache)
    assert read_header(other.gguf_path).name == "elsewhere"


def test_changed_content_is_converted_anew(checkpoint: Path, cache: Path) -> None:
    first = resolved(str(checkpoint), cache)
    weights = checkpoint / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert resolved(str(checkpoint), cache).gguf_path != first.gguf_path


def test_a_worker_may_ask_for_every_type_of_the_converter() -> None:
    assert set(FORMATS) == set(get_args(Settings.model_fields["outtype"].annotation))


QUICK = ("f16", "q4_k_m")


@pytest.mark.parametrize(
    "outtype",
    [*QUICK, *(pytest.param(t, marks=pytest.mark.long) for t in sorted({*FORMATS} - {*QUICK}))],
)
def test_a_worker_gets_the_type_that_it_asks_for(
    checkpoint: Path, cache: Path, outtype: str
) -> None:
    """Beside earlier conversions."""
    header = read_header(resolved(str(checkpoint), cache, outtype).gguf_path)
    assert header.quant_kind.lower() == outtype


def test_a_damaged_cached_model_is_converted_again(checkpoint: Path, cache: Path) -> None:
    first = resolved(str(checkpoint), cache)
    with first.gguf_path.open("r+b") as file:
        file.truncate(first.gguf_path.stat().st_size // 2)
    again = resolved(str(checkpoint), cache)
    assert again == first
    assert read_header(again.gguf_path).tensor_bytes > 0


def test_files_that_change_while_they_are_converted_are_not_kept(
    tmp_path: Path, checkpoint: Path, converted_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = conversion._run_converter

    async def run(*arguments: Any) -> None:
        await plain(*arguments)
        with (checkpoint / "config.json").open("a") as file:
            file.write(" ")

    monkeypatch.setattr(conversion, "_run_converter", run)
    with pytest.raises(ModelError, match="changed while they were converted"):
        resolved(str(checkpoint), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_a_file_that_cannot_be_written_whole_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "notes/a", b"x")
    assert not list((tmp_path / "notes").iterdir())


def test_two_workers_that_start_at_once_convert_once(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys; from worker.models.resolve import Settings, resolve\n"
        "phases, settings = set(), Settings(cache_dir=sys.argv[1])\n"
        "found = asyncio.run(resolve(settings, None, lambda p: phases.add(p.phase)))\n"
        "print('convert' in phases, found.gguf_path)"
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [worker.communicate(timeout=120)[0].split() for worker in workers]
    assert sorted(converted for converted, _ in outputs) == ["False", "True"]
    assert len({path for _, path in outputs}) == 1


def test_a_stopped_worker_leaves_no_child_and_no_files(tmp_path: Path, checkpoint: Path) -> None:
    async def stopped_in_the_middle() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(
            resolve(
                Settings(cache_dir=tmp_path / "cache"),
                str(checkpoint),
                lambda p: begun.set() if p.phase not in ("resolve", "hash") else None,
            )
        )
        await asyncio.wait_for(begun.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stopped_in_the_middle())
    alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in alive if "worker.commands.convert" in p.cmdline()]
    left = [p.name for p in (tmp_path / "cache/converted").rglob("*") if p.is_file()]
    assert left in ([], ["model-q8_0.lock"])
    assert resolved(str(checkpoint), tmp_path / "cache").gguf_path.is_file()


def test_a_killed_worker_leaves_nothing_that_looks_like_a_model(
    tmp_path: Path, checkpoint: Path
) -> None:
    script = (
        "import asyncio, sys; from worker.models.resolve import Settings, resolve\n"
        "settings = Settings(cache_dir=sys.argv[2])\n"
        "asyncio.run(resolve(settings, sys.argv[1], lambda p: print(p.phase, flush=True)))"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", script, str(checkpoint), str(tmp_path / "cache")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.strip() not in ("resolve", "hash"):
            break
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    models = [
        p for p in (tmp_path / "cache/converted").glob("*/*.gguf") if not conversion.usable(p)
    ]
    assert models == []
    found = resolved(str(checkpoint), tmp_path / "cache")
    assert conversion.usable(found.gguf_path)
    assert list(found.gguf_path.parent.rglob("*.gguf")) == [found.gguf_path]


def test_a_path_that_the_system_refuses_is_not_usable() -> None:
    """Then the conversion names the folder and a remedy."""
    assert not conversion.usable(Path("a" * 300))


# --- what is refused -----------------------------------------------------------------------


def refused(ref: str, cache: Path) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        resolved(ref, cache)
    assert "\n" not in caught.value.message
    return caught.value


def test_a_truncated_checkpoint_is_the_converters_own_error(
    tmp_path: Path, checkpoint: Path
) -> None:
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    error = refused(str(checkpoint), tmp_path / "cache")
    assert not list((tmp_path / "cache/converted").iterdir())
    assert isinstance(error, ModelError) and error.exit_code == 3
    assert "model.safetensors" in error.message
    assert not list((tmp_path / "cache/converted").rglob("*.gguf"))


def test_a_conversion_without_the_engine_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "ENGINE", "no-such-engine")
    error = refused("tiny-model", tmp_path / "cache")
    assert isinstance(error, BackendMismatch) and "install-engine" in error.message
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "model.bin"])
def test_an_index_that_names_weights_elsewhere_is_refused(
    tmp_path: Path, checkpoint: Path, shard: str
) -> None:
    index = {"weight_map": {"token_embd": shard}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    error = refused(str(checkpoint), tmp_path / "cache")
    assert isinstance(error, ModelError) and "invalid shard" in error.message


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "story.gguf"
    text.write_text("Once upon a time")
    error = refused(str(text), tmp_path)
    assert "begins with 'Once' instead of 'GGUF'" in error.message and error.exit_code == 3
    for ref in (str(tmp_path / "none.gguf"), "./o/r", "o/r.gguf", "o/r/s"):
        assert refused(ref, tmp_path).message.startswith("There is no file or folder '/")
    for ref in ("o/r", "o/r@main", "o/r:Q4_K_M", "o/r::file=m.gguf"):
        assert refused(ref, tmp_path).message.endswith(f"for a repository give hf:{ref}.")
    vocab = write_gguf(tmp_path / "vocab.gguf", tensors=False)
    error = refused(str(vocab), tmp_path)
    assert "vocabulary without weights" in error.message and error.exit_code == 3


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    error = refused(str(checkpoint), tmp_path / "file")
    assert isinstance(error, ModelError) and "--cache-dir" in error.message


@pytest.mark.parametrize("function", ["worker.models.checksum._hash", "pathlib.Path.iterdir"])
def test_an_unreadable_checkpoint_is_an_error_of_the_model(
    function: str, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's file or folder, as in a container, is not a fault of the worker."""

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(function, refuse)
    error = refused(str(checkpoint), tmp_path / "cache")
    assert isinstance(error, ModelError)
    assert error.message.startswith(f"'{checkpoint}")
    assert error.message.endswith("' cannot be read: Permission denied.")


def test_a_lock_that_cannot_be_opened_is_reported(checkpoint: Path, cache: Path) -> None:
    path = resolved(str(checkpoint), cache).gguf_path
    path.unlink()
    lock = path.with_suffix(".lock")
    lock.unlink(missing_ok=True)
    lock.mkdir()
    error = refused(str(checkpoint), cache)
    assert isinstance(error, ModelError)
    assert f"{str(path.parent)!r} cannot be used: Is a directory" in error.message
    assert "--cache-dir" in error.message


def test_a_cache_on_a_file_system_without_locks_is_named_as_such(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_file: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    error = refused(str(checkpoint), tmp_path)
    assert isinstance(error, ModelError)
    assert "cannot be used: its file system has no file locks" in error.message


def test_gguf_files_split_ones_and_local_aliases_are_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    found = resolved(str(path), tmp_path)
    assert (found.gguf_path, found.kind, found.model_ref) == (path, "gguf", str(path))
    parts = write_split(tmp_path)
    assert resolved(str(parts[0]), tmp_path).gguf_path == parts[0]
    assert "give its first part" in refused(str(parts[1]), tmp_path).message
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.toml").write_text("[models.mine]\npath = 'm.gguf'\n")
    assert resolved("mine", tmp_path).gguf_path == path
    (tmp_path / "models.toml").write_text("[models.tiny-model]\npath = 'm.gguf'\n")
    assert resolved("tiny-model", tmp_path).gguf_path == path, "the bundled one has no such alias"
    (tmp_path / "plain").mkdir()
    assert "no config.json." in refused("plain", tmp_path).message
    write_gguf(tmp_path / "plain/m.gguf")
    (tmp_path / "plain/a-folder.gguf").mkdir()
    hint = f"; to serve a GGUF in it, give its path: {tmp_path / 'plain/m.gguf'}"
    assert f"no config.json{hint}." in refused("plain", tmp_path).message
    for name in ("mmproj-m.gguf", "n-00001-of-00002.gguf", "n-00002-of-00002.gguf"):
        write_gguf(tmp_path / "plain" / name)
    hint += " (others: n-00001-of-00002.gguf)."
    assert f"no config.json{hint}" in refused("plain", tmp_path).message
    for name, lacks in (("config.json", "none of "), ("tokenizer.json", "no .safetensors")):
        (tmp_path / "plain" / name).write_text("{}")
        assert lacks in (message := refused("plain", tmp_path).message) and hint in message


def test_the_error_of_a_child_that_dies_has_its_last_words(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho 'not json'\necho 'out of memory' >&2\nkill -9 $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    error = refused(str(checkpoint), tmp_path / "cache")
    assert isinstance(error, ModelError)
    assert "killed by SIGKILL" in error.message and error.message.endswith(": out of memory")


def test_errors_of_a_child_keep_their_class() -> None:
    sent = json.loads('{"code": "INVALID_CONFIG", "message": "x", "details": {"field": "outtype"}}')
    error = rebuild_error(sent, ModelError)
    assert isinstance(error, ConfigError) and error.details == {"field": "outtype"}
    assert isinstance(rebuild_error({"code": "NEW", "message": "y"}, ModelError), ModelError)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert default_cache_dir() == Path("/var/cache/me/llorch-worker")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == Path.home() / ".cache/llorch-worker"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache/llorch-worker"


def test_the_hash_of_an_untouched_file_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(b"x" * 1000)
    first = sha256_of_file(path, tmp_path / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "_hash", None)
        assert sha256_of_file(path, tmp_path / "cache") == first, "it is not read again"
    stamp = path.stat()
    time.sleep(0.01)
    path.write_bytes(b"y" * 1000)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # like a restored backup
    assert sha256_of_file(path, tmp_path / "cache") == sha256_of_file(path) != first
