"""The worker answers like llama-server, except for a table, and in the types of its clients'
SDKs."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from builds.pins import pins
from tests.support.bundled import bundled_gguf
from tests.support.random_adapters import random_control_vector
from tests.support.worker import WorkerProcess
from tools.bench.peer_build import peers_of
from tools.differential import bodies, sdk_types
from tools.differential.asking import Asked, answered
from tools.differential.compare import Report
from tools.differential.servers import Pair, pairs


def test_made_up_requests_have_llama_servers_answers(tmp_path: Path) -> None:
    """A few of the requests of `make differential`."""
    if not peers_of(pins()).folder.is_dir():
        pytest.skip("llama-server takes minutes to build; make differential does")
    report = Report()
    for pair in pairs(tmp_path):
        with pair:
            report.add(pair, 20, seed=1)
    assert not report.faults, report.text(1)


KV_TYPES = (
    *((each, each) for each in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "bf16", "f16")),
    ("q8_0", "q4_0"), ("q4_0", "f16"), ("f16", "iq4_nl"), ("bf16", "q5_1"), ("f32", "q8_0"),
)  # fmt: skip


def greedy_texts(tmp_path: Path, **changes: Any) -> list[str]:
    """Return the worker's greedy texts, which equal llama-server's if computed alone and from the
    prompt's first token, so that both compute the same batches."""
    found = []
    with Pair("greedy", bundled_gguf("f32"), tmp_path, bodies.generating, **changes) as pair:
        for text in bodies.TEXTS:
            body = {"prompt": text * 3, "n_predict": 48, "temperature": 0, "ignore_eos": True}
            request = Asked("/completion", {**body, "cache_prompt": False})
            expected, own = (each.whole["content"] for each in pair.answers(request))
            assert own == expected, text
            found.append(own)
    return found


@pytest.mark.long
@pytest.mark.parametrize("types", KV_TYPES, ids="-".join)
def test_a_kv_type_has_llama_servers_greedy_texts(types: tuple[str, str], tmp_path: Path) -> None:
    greedy_texts(tmp_path, kv_types=types)


CHANGES: dict[str, tuple[str, ...]] = {
    "metadata": (
        "--override-kv",
        "llama.attention.layer_norm_rms_epsilon=float:0.3,llama.rope.freq_base=float:150",
    ),
    "bos": ("--override-kv", "tokenizer.ggml.add_bos_token=bool:false"),
    "rope": ("--rope-freq-base", "500", "--rope-freq-scale", "0.5"),
    "yarn": ("--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "128"),
}


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_has_llama_servers_greedy_texts(change: str, tmp_path: Path) -> None:
    assert greedy_texts(tmp_path, flags=CHANGES[change]) != greedy_texts(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("layers", [(), ("2", "3")], ids=["all", "some"])
def test_control_vectors_have_llama_servers_greedy_texts(
    layers: tuple[str, ...], tmp_path: Path
) -> None:
    base = bundled_gguf("f32")
    one, two = (random_control_vector(base, tmp_path / f"{n}.gguf", n) for n in range(2))
    changed = greedy_texts(
        tmp_path,
        flags=("--control-vector", str(one))
        + (("--control-vector-layer-range", *layers) if layers else ()),
        theirs=("--control-vector-scaled", f"{two}:-0.4"),
        ours=("--control-vector", f"{two}:-0.4"),
    )
    assert changed != greedy_texts(tmp_path)


@pytest.mark.parametrize("path", bodies.OF_THE_SDKS)
def test_each_answer_and_event_has_the_sdks_own_type(worker: WorkerProcess, path: str) -> None:
    """Strictly: every required field, no other type, and no unlisted field."""
    found: dict[str, Asked] = {}
    n_read = 0
    with httpx.Client(trust_env=False, timeout=60) as client:
        for seed in range(12):
            request = Asked(path, bodies.OF_THE_SDKS[path](Random(seed)))
            answer = answered(client, worker.base_url, request)
            n_read += answer.status == 200
            found |= dict.fromkeys(sdk_types.faults(request, answer), request)
    assert not found
    assert n_read >= 6


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps"])
def test_listings_have_the_sdks_own_type(worker: WorkerProcess, path: str) -> None:
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = answered(client, worker.base_url, Asked(path))
    assert answer.status == 200 and not list(sdk_types.faults(Asked(path), answer))
