"""Texts that are embedded or ranked: in batches, by concurrent callers, and by a single one. Each
server runs on its own defaults.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from tools.bench.client import Recording, Request
from tools.bench.errors import BenchError
from tools.bench.loads import Load, Metrics, Prompt, RequestsOf, by_name, text_of
from tools.bench.model import EMBEDDER, RANKER
from tools.bench.stats import percentile
from tools.bench.streams import TokenStream, body_pieces

SHORTEST, LONGEST = 10, 120
"""Words of a text, hardly more than a token each."""
N_BATCH = 32
TOP = 3
"""Documents that a ranking returns."""


def _batches(n_calls: int, n_texts: int) -> Callable[[random.Random, Sequence[str]], list[Prompt]]:
    def make(rng: random.Random, words: Sequence[str]) -> list[Prompt]:
        def text() -> str:
            return text_of(rng, words, rng.randint(SHORTEST, LONGEST)).strip()

        return [
            Prompt("", 0, fields={"input": [text() for _ in range(n_texts)]})
            for _ in range(n_calls)
        ]

    return make


def _calls_by(n_callers: int, model: str) -> RequestsOf:
    """Each caller sends its next call when the previous one is answered."""

    def requests_of(
        prompts: list[Prompt], model_id: str, sampling: dict[str, Any]
    ) -> list[Request]:
        requests = []
        for index, prompt in enumerate(prompts):
            after = index - n_callers if index >= n_callers else None
            texts = list(prompt.fields["input"])
            path, body = "/v1/embeddings", dict[str, Any](input=texts)
            if model == RANKER:
                path, body = "/v1/rerank", dict(query=texts[0], documents=texts, top_n=TOP)
            requests.append(Request(path, {"model": model_id, **body}, after_end=after))
        return requests

    return requests_of


def whole_answer(recording: Recording) -> TokenStream:
    """Read an answer in JSON, which is complete with its last byte; counts its items."""
    pieces = list(body_pieces(recording))
    if not pieces:
        raise BenchError("A call ended without an answer.")
    answer = json.loads(b"".join(data for _, data in pieces))
    items = answer.get("data", answer.get("results"))
    if not items:
        raise BenchError(f"A call returned {json.dumps(answer)[:300]}.")
    return TokenStream(recording.sent_s, (pieces[-1][0],), "", None, len(items))


def read_texts(answers: list[TokenStream], prompts: list[Prompt]) -> Metrics:
    counts = [len(prompt.fields["input"]) for prompt in prompts]
    for answer, count in zip(answers, counts, strict=True):
        if answer.n_tokens not in (count, min(count, TOP)):
            raise BenchError(f"A call returned {answer.n_tokens} results for {count} texts.")
    first = min(answer.sent_s for answer in answers)
    last = max(answer.token_times_s[-1] for answer in answers)
    times = [answer.e2e_s for answer in answers]
    return {
        "texts_per_s": sum(counts) / (last - first),
        "e2e_p50_ms": percentile(times, 50) * 1e3,
        "e2e_p95_ms": percentile(times, 95) * 1e3,
    }


def _load(name: str, n_callers: int, n_calls: int, n_texts: int, model: str = EMBEDDER) -> Load:
    return Load(
        name,
        None,
        _batches(n_calls, n_texts),
        read_texts,
        model=model,
        requests_of=_calls_by(n_callers, model),
        parse=whole_answer,
        divisible=True,
    )


LOADS = by_name(
    _load("embed1", 1, 64, 1),
    _load("embed8", 8, 256, 1),
    _load("embed32", 1, 12, N_BATCH),
    _load("rank32", 1, 12, N_BATCH, RANKER),
)
