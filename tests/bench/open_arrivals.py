"""Open arrivals: requests come when they come, whether or not the server is done with the others.

Poisson arrivals; prompts of 20 to 1,200 words, uniform in the logarithm; a third begin alike; 16 to
200 tokens out. The same seed gives each server the same requests at the same times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from tests.bench.loads import Load, Prompt, read_throughput, text_of
from tests.bench.servers import Shape

SHAPE = Shape(slots=16, context_per_slot=1536)
SHORTEST, LONGEST, COMMON = 20, 1200, 200
FEWEST_OUT, MOST_OUT = 16, 200
SHARE_OF_LONG = math.log(LONGEST / SHORTEST) / math.log(LONGEST / COMMON) / 3
"""Of the prompts that are longer than the common beginning; a third of all."""
CAPACITY = "capacity"
"""The load that finds out how many requests a second a server can bear: all at once."""


def requests_made(
    count: int, rate: float | None
) -> Callable[[random.Random, Sequence[str]], list[Prompt]]:
    """`count` requests, `rate` of them a second; without a rate all at once."""

    def make(rng: random.Random, words: Sequence[str]) -> list[Prompt]:
        common = text_of(rng, words, COMMON)
        prompts, at_s = [], 0.0
        for _ in range(count):
            n_words = round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST))))
            begins_alike = n_words > COMMON and rng.random() < SHARE_OF_LONG
            text = common if begins_alike else ""
            text += text_of(rng, words, n_words - (COMMON if begins_alike else 0))
            prompts.append(Prompt(text, rng.randint(FEWEST_OUT, MOST_OUT), at_s=at_s))
            at_s += rng.expovariate(rate) if rate else 0.0
        return prompts

    return make


def capacity_load(count: int) -> Load:
    return Load(CAPACITY, SHAPE, requests_made(count, None), read_throughput, timeout_s=600)


def open_load(percent: int, count: int, capacity: float) -> Load:
    """`percent` of a capacity in requests a second."""
    rate = capacity * percent / 100
    make = requests_made(count, rate)
    return Load(f"open{percent}", SHAPE, make, read_throughput, timeout_s=900)
