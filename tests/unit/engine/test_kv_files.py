"""Stored prefixes as files: which are found in a folder, trusted and evicted."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.worker import until
from worker.engine.cache import disk
from worker.engine.cache.binding import open_disk
from worker.engine.cache.disk import Disk
from worker.engine.cache.disk_file import Damaged, Entry, read, read_entry, write
from worker.engine.cache.moves import Snapshot, State
from worker.engine.tokens import common_length
from worker.errors import ConfigError
from worker.llama.memory_kind import MemoryKind
from worker.setting_files import KEY_BYTES, KEY_FILE, check_store
from worker.wire.adapters import Scope
from worker.wire.engine_settings import EngineSettings

KEY = b"k" * 32
CUT_ANYWHERE = MemoryKind()
NOBODYS = Scope()


def state(
    tokens: Iterable[int],
    data: bytes | memoryview,
    snapshots: tuple[Snapshot, ...] = (),
    scope: Scope = NOBODYS,
) -> State:
    return State([*tokens], scope, len(data), memoryview(data), [*snapshots])


STATE = state(range(40), b"state" * 20, (Snapshot(33, b"window"),))


def opened(
    folder: Path,
    limit_bytes: int = 1 << 20,
    binding: str = "b" * 64,
    adapters: tuple[str, ...] = (),
    kind: MemoryKind = CUT_ANYWHERE,
) -> Disk:
    return Disk(folder, limit_bytes, kind, lambda _: (binding, adapters))


def stored(store: Disk, state: State) -> None:
    """Write a state, and wait until it is stored."""
    written: list[bool] = []
    store.write(state, lambda: written.append(True))
    until(lambda: bool(written), lambda: "nothing is written")


def read_back(store: Disk, tokens: Iterable[int]) -> tuple[Path, State | None]:
    """Return the file with the longest prefix of these tokens, and its state if it is usable."""
    found = store.longest([*tokens], NOBODYS)
    assert found is not None
    got: list[State | None] = []
    store.read(found[0], NOBODYS, got.append)
    until(lambda: got, lambda: "nothing is read")
    return found[0].path, got[0]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


# --- one file --------------------------------------------------------------------------------


def test_a_file_is_read_as_written_and_is_private(tmp_path: Path) -> None:
    entry = write(tmp_path / "one.kv", STATE, "salt", KEY)
    assert entry.path.stat().st_mode & 0o777 == 0o600
    assert entry.size_bytes == entry.path.stat().st_size
    found = read_entry(entry.path)
    assert (found.tokens.tolist(), found.salt) == (STATE.tokens, "salt")
    again = read(found, Scope("salt"), KEY)
    assert again.data is not None and (again.n_bytes, again.scope) == (100, Scope("salt"))
    assert (again.tokens, bytes(again.data)) == (STATE.tokens, b"state" * 20)
    assert [(each.length, each.data) for each in again.snapshots] == [(33, b"window")]
    assert memoryview(again.data.obj).nbytes == 100, "no part keeps the others in memory"
    assert os.listdir(tmp_path) == ["one.kv"]


def test_a_state_may_be_restored_while_it_is_written(tmp_path: Path) -> None:
    """Although restoring writes into its head."""
    data = bytearray(8 << 20)
    written: list[Entry] = []
    one = state(range(40), memoryview(data))
    enough = Event()

    def write_on() -> None:
        while not enough.is_set():
            written.append(write(tmp_path / "one.kv", one, "", KEY))

    writer = Thread(target=write_on)
    writer.start()
    number = 0
    while writer.is_alive() and (number < 10_000 or len(written) < 3):
        number += 1
        data[8:12] = (number % 9).to_bytes(4, "little")
    enough.set()
    writer.join()
    assert number >= 10_000
    assert read(written[-1], NOBODYS, KEY).n_bytes == len(data)


def test_a_wrong_bit_anywhere_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "one.kv", STATE, "", KEY).path
    content = path.read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(Damaged):
            read(read_entry(path), NOBODYS, KEY)


@pytest.mark.parametrize("length", [0, 7, 30, 200, -1])
def test_a_file_that_is_cut_off_is_damaged(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "one.kv", STATE, "", KEY).path
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(Damaged):
        read_entry(path)


def test_files_that_others_may_have_made_are_not_read(tmp_path: Path) -> None:
    entry = write(tmp_path / "one.kv", STATE, "", KEY)
    with pytest.raises(Damaged, match="another"):
        read(entry, NOBODYS, b"x" * 32)
    entry.path.chmod(0o640)
    with pytest.raises(Damaged, match="others"):
        read(entry, NOBODYS, KEY)
    (tmp_path / "link.kv").symlink_to(entry.path)
    with pytest.raises(Damaged, match="link"):
        read_entry(tmp_path / "link.kv")
    os.mkfifo(tmp_path / "pipe.kv")
    with pytest.raises(Damaged, match="regular"):
        read_entry(tmp_path / "pipe.kv")


# --- the folder ------------------------------------------------------------------------------


def test_the_longest_prefix_of_the_same_tenant_is_found(tmp_path: Path) -> None:
    store = opened(tmp_path)
    stored(store, state(range(40), b"a", scope=Scope("tenant")))
    stored(store, state([*range(20), 7, 8], b"b", scope=Scope("tenant")))
    for again in (store, opened(tmp_path)):
        found = again.longest([*range(30), 99], Scope("tenant"))
        assert found is not None and found[1] == 30 and len(found[0].tokens) == 40
        assert again.longest(range(30), Scope()) is None
        assert again.longest(range(30), Scope("other")) is None
        assert again.has(range(40), Scope("tenant")) and not again.has(range(41), Scope("tenant"))
    assert b"tenant" not in b"".join(path.read_bytes() for path in files(tmp_path))


@pytest.mark.parametrize(
    ("kind", "left"), [(CUT_ANYWHERE, [60]), (MemoryKind(recurrent=True), [40, 60])]
)
def test_a_longer_prefix_replaces_those_to_which_it_can_be_cut(
    tmp_path: Path, kind: MemoryKind, left: list[int]
) -> None:
    store = opened(tmp_path, kind=kind)
    for n_tokens in (40, 50, 60):
        snapshots = (Snapshot(50, b"after fifty"),) if n_tokens == 60 else ()
        stored(store, state(range(n_tokens), b"s", snapshots))
    assert sorted(len(read_entry(path).tokens) for path in files(tmp_path)) == left


def test_the_adapters_of_a_prefix_are_found_at_any_index(tmp_path: Path) -> None:
    store = opened(tmp_path, adapters=("hash of a", "hash of b"))
    stored(store, replace(STATE, scope=Scope(None, ((1, 0.5),))))
    other = opened(tmp_path, adapters=("hash of b",))
    assert other.has(STATE.tokens, Scope(None, ((0, 0.5),)))
    for scope in (Scope(), Scope("a", ((0, 0.5),)), Scope(None, ((0, 1.0),))):
        assert not other.has(STATE.tokens, scope)
    assert not store.has(STATE.tokens, Scope(None, ((0, 0.5),)))


def test_the_least_recently_used_file_is_evicted(tmp_path: Path) -> None:
    store = opened(tmp_path, limit_bytes=3500)
    for first in range(3):
        tokens = range(first, first + 10)
        stored(store, state(tokens, bytes(1000)))
        found = store.longest(tokens, Scope())
        assert found is not None
        os.utime(found[0].path, (first, first))
    used, _ = read_back(store, range(10))
    stored(store, state(range(9, 19), bytes(1000)))
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 3500
    assert used in files(tmp_path)
    assert store.longest(range(1, 11), Scope()) is None, "the second was the longest unused"
    assert len(files(tmp_path)) == 3, "no other gave way"


def test_files_with_a_future_time_do_not_fill_the_store(tmp_path: Path) -> None:
    """Files with a future time would be evicted last until that time."""
    others = opened(tmp_path, limit_bytes=3500, binding="c" * 64)
    for first in range(3):
        stored(others, state(range(first, first + 10), bytes(1000)))
    (tmp_path / "left.part").write_bytes(bytes(1000))
    for path in tmp_path.iterdir():
        os.utime(path, (time.time() + 1e8,) * 2)
    store = opened(tmp_path, limit_bytes=3500)
    for first in range(3):
        stored(store, state(range(first, first + 10), bytes(1000)))
    assert all(store.has(range(first, first + 10), Scope()) for first in range(3))
    assert len(files(tmp_path)) == 3 and not [*tmp_path.glob("*.part")]


def test_of_many_files_few_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams wait while the engine searches for a prefix."""
    key = opened(tmp_path)._secret
    for number in range(300):
        tokens = [*range(64), 1000 + number, *range(200)]
        write(tmp_path / f"{'b' * 16}-{number}.kv", state(tokens, b"s"), "", key)
    store = opened(tmp_path)
    until(lambda: len(store._entries) == 300, lambda: "the folder is not read")
    compared: list[int] = []

    def counted(a: Sequence[int], b: Sequence[int]) -> int:
        compared.append(1)
        return common_length(a, b)

    monkeypatch.setattr(disk, "common_length", counted)
    found = store.longest([*range(64), 1007, *range(100)], NOBODYS)
    assert found is not None and found[1] == 165 and found[0].tokens[64] == 1007
    assert len(compared) <= 3


def test_all_bytes_of_the_folder_count(tmp_path: Path) -> None:
    """Including those around a state, and leftovers of a dead engine until nobody can still be
    writing them."""
    store = opened(tmp_path, limit_bytes=4600)
    left, abandoned = tmp_path / "left.part", tmp_path / "abandoned.part"
    for each, age in ((left, 0), (abandoned, 7200)):
        each.write_bytes(bytes(1150))
        os.utime(each, (time.time() - age,) * 2)
    for first in range(4):
        stored(store, state(range(first, first + 10), bytes(1000)))
        kept = [*tmp_path.glob("*.kv"), *tmp_path.glob("*.part")]
        assert left in kept and abandoned not in kept
        assert sum(path.stat().st_size for path in kept) <= 4600
    assert len(kept) == 4
    opened(tmp_path, limit_bytes=2400)
    assert len(files(tmp_path)) == 1, "the limit was lowered"


def test_another_models_files_are_neither_used_nor_removed(tmp_path: Path) -> None:
    stored(opened(tmp_path), STATE)
    other = opened(tmp_path, binding="c" * 64)
    assert other.longest(STATE.tokens, Scope()) is None
    assert len(files(tmp_path)) == 1
    # Not even under a name of its own.
    files(tmp_path)[0].rename(tmp_path / f"{'c' * 16}-1.kv")
    other = opened(tmp_path, binding="c" * 64)
    _, got = read_back(other, STATE.tokens)
    assert got is None and files(tmp_path) == []


def test_a_damaged_file_is_logged_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(opened(tmp_path), STATE)
    path = files(tmp_path)[0]
    path.write_bytes(b"LLORCHKV but nothing else that is right" * 3)
    assert opened(tmp_path).longest(STATE.tokens, Scope()) is None
    output = capsys.readouterr()
    assert "kv_store.ignored" in output.out + output.err and path.name in output.out + output.err
    assert files(tmp_path) == []


def test_a_file_that_another_worker_evicted_causes_no_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(store := opened(tmp_path), STATE)
    files(tmp_path)[0].unlink()
    _, got = read_back(store, STATE.tokens)
    assert got is None and store.longest(STATE.tokens, Scope()) is None
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=r"--kv-store .*chmod 700"):
        opened(folder)


def test_a_folder_that_cannot_have_a_secret_is_left_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, or a file system without links, because a failing start may be repeated."""

    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuses)
    with pytest.raises(ConfigError, match="cannot be used: no hard link .*: Operation not p"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match="cannot be used: no hard link .*: Operation not p"):
        check_store(tmp_path / "store")  # like `doctor`
    assert os.listdir(tmp_path) == []


def test_a_store_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for name in ("file", "file/store"):
        with pytest.raises(ConfigError, match="--kv-store .* cannot be used: .*/file is not a"):
            opened(tmp_path / name)


@pytest.mark.parametrize(("content", "mode"), [(b"short", 0o600), (bytes(KEY_BYTES), 0o644)])
def test_a_key_that_is_damaged_or_known_to_others_is_refused_before_a_load(
    tmp_path: Path, content: bytes, mode: int
) -> None:
    (tmp_path / KEY_FILE).write_bytes(content)
    (tmp_path / KEY_FILE).chmod(mode)
    with pytest.raises(ConfigError, match='"key" is damaged or open to others; remove the folder'):
        check_store(tmp_path)


def test_a_key_that_is_a_pipe_holds_up_no_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / KEY_FILE, 0o600)
    with pytest.raises(ConfigError, match='"key" is damaged'):
        check_store(tmp_path)


def test_a_store_that_has_become_unusable_costs_the_next_engine_only_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store").touch()
    settings = EngineSettings(kv_store=str(tmp_path / "store"))
    info, header = cast(Any, SimpleNamespace(kv_store_bytes=1 << 20)), cast(Any, None)
    assert open_disk(header, settings, info, CUT_ANYWHERE, None) is None
    assert "kv_store.unusable" in capsys.readouterr().out
