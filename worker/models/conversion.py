"""Converts SafeTensors into a cached GGUF, in a child process, once per content.

Runs on the API process's event loop; hashing and header checks go to a thread. The result is
`<cache>/converted/<key>/model-<outtype>.gguf`. The key is a hash of the checkpoint's bytes and of
the converter's own source, so neither an edited checkpoint nor another converter reuses a stale
model. A file lock lets one of several workers convert. Each attempt writes into a folder of its
own, and its file is renamed into place only after its header has been read back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from worker.child_processes import how_it_ended, inherited
from worker.errors import ModelError, WorkerError, of_lock, rebuild_error
from worker.installation import ENGINE, check_engine
from worker.models.checkpoint_files import check_checkpoint, checkpoint_files, readable
from worker.models.checksum import sha256_of_file
from worker.models.gguf.header import GgufHeader, read_header
from worker.models.gguf.servable import check_servable
from worker.models.scratch import Scratch
from worker.models.stored import CONVERTED
from worker.wire.messages import OnProgress, Progress

_PACKAGE = Path(__file__).resolve().parents[1]
LOCK_POLL_SECONDS = 0.1
TERMINATE_GRACE_SECONDS = 3.0
MAX_LINE_BYTES = 2**20


async def convert_cached(
    folder: Path, *, cache_dir: Path, outtype: str, on_progress: OnProgress, name: str
) -> GgufHeader:
    """The GGUF of a SafeTensors folder, from the cache or converted now; `name` is in its metadata.

    The converter checks tokenizers with the engine. If it is not installed, or has another release,
    raises `BackendMismatch` before anything is written.
    """
    check_engine()
    await asyncio.to_thread(check_checkpoint, folder)

    def key_now(on_progress: OnProgress) -> str:
        return content_key(folder, checkpoint_files(folder), name, cache_dir, on_progress)

    def arguments(written: str) -> Sequence[str]:
        return (str(folder), written, "--outtype", outtype, "--name", name)

    file = f"model-{outtype}.gguf"
    return await convert_once(cache_dir, file, arguments, check_servable, key_now, on_progress)


async def convert_once(
    cache_dir: Path,
    name: str,
    arguments: Callable[[str], Sequence[str]],
    check: Callable[[GgufHeader], None],
    key_now: Callable[[OnProgress], str],
    on_progress: OnProgress,
) -> GgufHeader:
    """The converted file `name`: the cached one if it passes `check`, else a new one.

    `arguments` returns the converter's arguments for the path to write. `key_now` computes the key
    of the source, which names the file's folder.

    Raises `ModelError` if the source changes during the conversion.
    """
    target = cache_dir / CONVERTED / await asyncio.to_thread(key_now, on_progress) / name

    async def convert() -> GgufHeader:
        with _writing(target.parent):
            scratch = Scratch(target.parent)
        with scratch as attempt:
            written = attempt / target.name
            await _run_converter(arguments(str(written)), on_progress)
            check(await asyncio.to_thread(read_header, written))
            if await asyncio.to_thread(key_now, lambda progress: None) != target.parent.name:
                raise ModelError(
                    "The model's files changed while they were converted; start again."
                )
            os.replace(written, target)
            return await asyncio.to_thread(read_header, target)

    header = await asyncio.to_thread(usable, target, check)
    if header is None:
        with _writing(target.parent):
            await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
        async with _locked(lock := target.with_suffix(".lock"), on_progress):
            header = await asyncio.to_thread(usable, target, check)
            if header is None:
                try:
                    header = await convert()
                except BaseException:
                    with contextlib.suppress(OSError):  # leave no empty folder
                        lock.unlink()
                        target.parent.rmdir()
                    raise
    with contextlib.suppress(OSError):
        os.utime(target.parent)  # the time of the last use, for eviction
    return header


@readable()
def content_key(
    folder: Path, files: Sequence[Path], what: str, cache_dir: Path, on_progress: OnProgress
) -> str:
    """The key: a hash of the files' names and bytes, the converter, and `what`, other inputs."""
    total = sum(path.stat().st_size for path in files) or 1
    digest = hashlib.sha256(_converter_digest() + f"{what}\n".encode())
    done = 0
    for path in files:
        on_progress(Progress("hash", round(100 * done / total, 1), total_bytes=total))
        digest.update(f"{path.relative_to(folder)}\0{sha256_of_file(path, cache_dir)}\n".encode())
        done += path.stat().st_size
    return digest.hexdigest()[:32]


def _converter_digest() -> bytes:
    """A hash of the source of the converter and of the rooms that it uses, and of the versions of
    its libraries: a changed converter does not reuse older results."""
    versions = [version(name) for name in (ENGINE, "gguf", "numpy")]
    digest = hashlib.sha256(repr(versions).encode())
    for room in ("convert", "llama", "models"):
        for path in sorted((_PACKAGE / room).rglob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


def usable(path: Path, check: Callable[[GgufHeader], None] = check_servable) -> GgufHeader | None:
    """The header of a cached GGUF; `None` if it is missing or does not pass `check`."""
    if not os.path.isfile(path):  # false as well if this user may not enter its folder
        return None
    with contextlib.suppress(ModelError):
        check(header := read_header(path))
        return header
    return None


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise `ModelError` if the system refuses a folder of the cache."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"The cache folder {str(folder)!r} cannot be used: {error.strerror}; "
            "choose another with --cache-dir.",
            path=str(folder),
        ) from error


@contextlib.asynccontextmanager
async def _locked(path: Path, on_progress: OnProgress) -> AsyncIterator[None]:
    """Hold the file lock, without blocking the event loop while another worker has it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, thread_local=False)
    while not lock.is_locked:
        with _writing(path.parent), of_lock():
            try:
                lock.acquire(timeout=0)
            except Timeout:
                on_progress(Progress("waiting for another worker's conversion", 0.0))
                await asyncio.sleep(LOCK_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()


async def _run_converter(arguments: Sequence[str], on_progress: OnProgress) -> None:
    """Run the converter to its end; cancelling this ends the child first."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "worker.commands.convert", *arguments, "--progress", "json"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=inherited(),
        limit=MAX_LINE_BYTES,
    )
    assert process.stdout is not None and process.stderr is not None
    stderr = asyncio.create_task(process.stderr.read())
    try:
        error = await _follow(process.stdout, on_progress)
        exit_code = await process.wait()
        printed = (await stderr).decode("utf-8", errors="replace").strip()
    finally:
        stderr.cancel()
        await _end(process)
    if error is not None:
        raise error
    if exit_code != 0:
        how = how_it_ended(exit_code)
        last = printed.splitlines()[-1] if printed else "it printed nothing"
        raise ModelError(
            f"The converter ended ({how}): {last}", arguments=list(arguments), exit_code=exit_code
        )


async def _follow(stdout: asyncio.StreamReader, on_progress: OnProgress) -> WorkerError | None:
    """Forward progress lines; returns the error that the converter reports, if any."""
    error: WorkerError | None = None
    async for line in stdout:
        try:
            message = json.loads(line)
        except ValueError:
            continue  # a library printed it
        if not isinstance(message, dict):
            continue
        if "error" in message:
            error = rebuild_error(message["error"], ModelError)
        elif "phase" in message:
            phase, percent = str(message["phase"]), float(message.get("percent") or 0.0)
            rate, total = message.get("bytes_per_second"), message.get("total_bytes")
            on_progress(Progress(phase, percent, rate, total))
    return error


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), TERMINATE_GRACE_SECONDS)
    finally:  # even if the caller is cancelled meanwhile
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
