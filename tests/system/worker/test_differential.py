"""The worker answers as llama-server does, but for a table, and as its clients' SDKs read it."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import httpx
import pytest

from builds.pins import pins
from tests.support.bundled import bundled_gguf
from tests.support.worker import WorkerProcess
from tools.bench.peer_build import peers_of
from tools.differential import bodies, sdk_types
from tools.differential.asking import Asked, answered
from tools.differential.compare import Report
from tools.differential.servers import Pair, pairs


def test_made_up_requests_have_llama_servers_answers(tmp_path: Path) -> None:
    """A few of those of `make differential`."""
    if not peers_of(pins()).folder.is_dir():
        pytest.skip("llama-server takes minutes to build; make differential does")
    report = Report()
    for pair in pairs(tmp_path):
        with pair:
            report.add(pair, 40, seed=1)
    assert not report.faults, report.text(1)


KV_TYPES = (
    *((each, each) for each in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "bf16", "f16")),
    ("q8_0", "q4_0"), ("q4_0", "f16"), ("f16", "iq4_nl"), ("bf16", "q5_1"), ("f32", "q8_0"),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("types", KV_TYPES, ids="-".join)
def test_a_kv_type_has_llama_servers_greedy_texts(types: tuple[str, str], tmp_path: Path) -> None:
    """Alone and from the prompt's first token, so that both compute the same batches."""
    pair = Pair("kv", bundled_gguf("f32"), tmp_path, bodies.generating, kv_types=types)
    with pair:
        for text in bodies.TEXTS:
            body = {"prompt": text * 3, "n_predict": 48, "temperature": 0, "ignore_eos": True}
            asked = Asked("/completion", {**body, "cache_prompt": False})
            theirs, ours = (each.whole["content"] for each in pair.answers(asked))
            assert ours == theirs, text


@pytest.mark.parametrize("path", bodies.OF_THE_SDKS)
def test_each_answer_and_event_has_the_sdks_own_type(worker: WorkerProcess, path: str) -> None:
    """Strictly: every required field, no other type, and no field that is not listed."""
    found: dict[str, Asked] = {}
    n_read = 0
    with httpx.Client(trust_env=False, timeout=60) as client:
        for seed in range(12):
            asked = Asked(path, bodies.OF_THE_SDKS[path](Random(seed)))
            answer = answered(client, worker.base_url, asked)
            n_read += answer.status == 200
            found |= dict.fromkeys(sdk_types.faults(asked, answer), asked)
    assert not found
    assert n_read >= 6


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps"])
def test_listings_have_the_sdks_own_type(worker: WorkerProcess, path: str) -> None:
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = answered(client, worker.base_url, Asked(path))
    assert answer.status == 200 and not list(sdk_types.faults(Asked(path), answer))


def test_the_same_numbers_make_the_same_requests() -> None:
    def some(seed: int) -> list[Asked]:
        return list(itertools.islice(bodies.generating(Random(seed)), 50))

    assert some(3) == some(3) and some(3) != some(4)
