"""A conversation continues from stored cells after its engine was killed, and in the next
worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from tests.conftest import StartWorker
from tests.support.random_models import Kind, random_model
from tests.support.worker import WorkerProcess, until

WORDS = "One day Otto the fox went to the old mill by the river and saw a small red boat. " * 20


def turn(worker: WorkerProcess, so_far: list[int], text: str) -> tuple[list[int], dict[str, Any]]:
    """Continue; returns the whole conversation as token ids, and the last answer."""
    more = [int(i) for i in worker.post("/tokenize", {"content": text}).json()["tokens"]]
    prompt = so_far + more
    body = {"prompt": prompt, "return_tokens": True, "n_predict": 24, "temperature": 0}
    answer = worker.post("/completion", body | {"ignore_eos": True}).json()
    return prompt + answer["tokens"], answer


def until_stored(worker: WorkerProcess, store: Path, before: set[Path]) -> set[Path]:
    """Wait until there is a new file; returns all files."""
    until(lambda: bool({*store.glob("*.kv")} - before), lambda: worker.stderr[-2000:])
    return {*store.glob("*.kv")}


def check(start_worker: StartWorker, folder: Path, *flags: str) -> tuple[list[int], list[int]]:
    """Check; returns the conversation before and after the last turn."""
    store = folder / "store"
    flags = ("--kv-store", str(store), "--context-length", "1024", *flags)
    running = start_worker(*flags)
    conversation, _ = turn(running, [], WORDS)
    first = until_stored(running, store, set())
    running.replace_engine()
    longer, answer = turn(running, conversation, " What then?")
    assert answer["timings"]["cache_n"] >= 0.95 * answer["tokens_evaluated"], answer
    from_disk = running.metric('worker_tokens_reused_total{tier="disk"}')
    assert from_disk == answer["timings"]["cache_n"]
    assert running.get("/info").json()["engine"]["kv"]["store_bytes"] == 4096 << 20
    until_stored(running, store, first)
    assert running.stop() == 0

    running = start_worker(*flags)
    again, answer = turn(running, longer, " And then?")
    assert answer["timings"]["cache_n"] >= 0.95 * answer["tokens_evaluated"], answer
    assert running.stop() == 0
    return longer, again


def test_a_conversation_outlives_engine_and_worker(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    check(start_worker, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_stored_conversation_continues_with_each_kind_of_memory(
    start_worker: StartWorker, tmp_path: Path, kind: Kind
) -> None:
    flags = ("--model", str(random_model(kind)), "--flash-attention", "off")
    longer, again = check(start_worker, tmp_path, *flags)
    without = start_worker("--context-length", "1024", *flags)
    assert turn(without, longer, " And then?")[0] == again
    assert without.get("/info").json()["engine"]["kv"]["store_bytes"] is None
