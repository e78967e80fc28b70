"""Loads with more than text: pictures that join a running stream, a second question about a
picture, and streams with different adapters.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tests.support.pictures import picture, question
from tools.bench.forms import requests_with
from tools.bench.loads import (
    JOIN_SHAPE,
    STREAMS_SHAPE,
    Load,
    Metrics,
    Prompt,
    by_name,
    distinct,
    read_join,
    read_throughput,
    text_of,
)
from tools.bench.model import ADAPTED, SEEING
from tools.bench.stats import percentile
from tools.bench.streams import TokenStream

SIDE = 256
"""Side length of a picture in pixels: 1,024 patches, which become 272 rows of a prompt."""
N_PICTURES, N_OUT, N_IDLE = 4, 16, 64
LORAS: tuple[list[dict[str, Any]], ...] = (
    [],
    [{"id": 0, "scale": 1.0}],
    [{"id": 1, "scale": 1.0}],
)


def _shown(rng: random.Random, words: Sequence[str], seed: int, start: tuple[int, int]) -> Prompt:
    """A question about the picture with that seed."""
    shown = question(picture(seed, (SIDE, SIDE)), text_of(rng, words, 16))
    return Prompt("", N_OUT, start_after=start, fields={"messages": shown["messages"]})


def _joining(rng: random.Random, words: Sequence[str]) -> list[Prompt]:
    """A running stream, and pictures that come one after another once it has sent some tokens."""
    running = Prompt(text_of(rng, words, 128), 900, end_with=N_PICTURES)
    starts = [(0, N_IDLE), *((n, N_OUT) for n in range(1, N_PICTURES))]
    return [running, *(_shown(rng, words, rng.getrandbits(32), start) for start in starts)]


def _twice(rng: random.Random, words: Sequence[str]) -> list[Prompt]:
    """Two questions about each picture, one after another."""
    begin = Prompt(text_of(rng, words, 16), N_OUT)
    seeds = [seed for _ in range(N_PICTURES) for seed in [rng.getrandbits(32)] * 2]
    return [begin, *(_shown(rng, words, seed, (n, N_OUT)) for n, seed in enumerate(seeds))]


def _adapted(rng: random.Random, words: Sequence[str]) -> list[Prompt]:
    prompts = distinct(16, 128, 64)(rng, words)
    return [
        Prompt(prompt.text, prompt.n_out, fields={"lora": LORAS[n % len(LORAS)]})
        for n, prompt in enumerate(prompts)
    ]


def read_again(streams: list[TokenStream], prompts: list[Prompt]) -> Metrics:
    first, second = (percentile([each.ttft_s for each in streams[n::2]], 50) for n in (1, 2))
    return {
        "ttft_p50_ms": first * 1e3,
        "again_ttft_ms": second * 1e3,
        "again_share": second / first,
    }


_CHAT = requests_with({})
LOADS = by_name(
    Load("pictures", JOIN_SHAPE, _joining, read_join, 300, model=SEEING, requests_of=_CHAT),
    Load("again", JOIN_SHAPE, _twice, read_again, 300, model=SEEING, requests_of=_CHAT),
    Load("adapters16", STREAMS_SHAPE, _adapted, read_throughput, 300, model=ADAPTED),
)
