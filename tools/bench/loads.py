"""The closed loads: which streams are sent together, and the figures computed from their times.

Prompts are drawn from single-token words with a seed of round, load and stream: each server of a
round gets the same text, and no text is repeated, so a server's prefix cache helps only in the
loads that are meant to test it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tools.bench.client import Driven, Recording, Request
from tools.bench.errors import BenchError
from tools.bench.model import BIG_VOCABULARY, GUESSABLE, INSTRUCT, RANDOM
from tools.bench.servers import Shape
from tools.bench.stats import percentile
from tools.bench.streams import TokenStream, token_stream

Flavour = Literal["completions", "execute"]
Metrics = dict[str, float]

STREAMS_SHAPE = Shape(slots=16, context_per_slot=1024)
MANY_SHAPE = Shape(slots=64, context_per_slot=256)
JOIN_SHAPE = Shape(slots=4, context_per_slot=5120)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "chat": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 1},
    "temperature": {"temperature": 1, "seed": 1},
    "nucleus": {"temperature": 1, "top_p": 0.95, "top_k": 40, "seed": 1},
    "logprobs": {"temperature": 0, "logprobs": 5},
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One stream of a load before it takes a server's dialect."""

    text: str
    n_out: int
    at_s: float = 0.0
    start_after: tuple[int, int] | None = None
    end_with: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are added to the body, or replace the load's."""


RequestsOf = Callable[[list[Prompt], str, dict[str, Any]], list[Request]]
"""Makes the requests from prompts, a model's id and the fields of the sampling."""


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    shape: Shape | None
    """`None`: each server uses its own defaults."""
    make: Callable[[random.Random, Sequence[str]], list[Prompt]]
    reduce: Callable[[list[TokenStream], list[Prompt]], Metrics]
    timeout_s: float = 180.0
    model: str = RANDOM
    sampling: str | None = None
    """One of SAMPLINGS, if the load tests sampling."""
    busy: bool = False
    """Whether other processes keep half of the cores busy."""
    requests_of: RequestsOf | None = None
    """Makes the requests of a load that has only one form; otherwise each dialect has its own."""
    parse: Callable[[Recording], TokenStream] = token_stream
    divisible: bool = False
    """Whether a quarter of its prompts is still a meaningful load."""

    def requests(
        self,
        prompts: list[Prompt],
        model_id: str,
        sampling: dict[str, Any],
        flavour: Flavour = "completions",
        tag: str = "",
    ) -> list[Request]:
        """Return the requests to a server; jobs of `/execute` have ids that begin with the tag."""
        if self.requests_of is not None:
            return self.requests_of(prompts, model_id, sampling)
        return [
            _completion(prompt, model_id, sampling)
            if flavour == "completions"
            else _job(prompt, f"{tag}-{index}", sampling)
            for index, prompt in enumerate(prompts)
        ]

    def quick(self) -> Load:
        """The same load with fewer tokens: it shows regressions, but not their size."""

        def make(rng: random.Random, words: Sequence[str]) -> list[Prompt]:
            prompts = self.make(rng, words)
            if self.divisible:
                prompts = prompts[: len(prompts) // 4]
            prompts = [replace(prompt, at_s=prompt.at_s / 4) for prompt in prompts]
            return [
                prompt
                if prompt.n_out <= FEWEST_OUT or prompt.end_with is not None
                else replace(prompt, n_out=max(FEWEST_OUT, prompt.n_out // 4))
                for prompt in prompts
            ]

        return replace(self, make=make)


def distinct(n_streams: int, n_words: int, n_out: int) -> Callable[..., list[Prompt]]:
    def make(rng: random.Random, words: Sequence[str]) -> list[Prompt]:
        return [Prompt(text_of(rng, words, n_words), n_out) for _ in range(n_streams)]

    return make


def shared(n_streams: int, n_words: int, share: float, n_out: int) -> Callable[..., list[Prompt]]:
    def make(rng: random.Random, words: Sequence[str]) -> list[Prompt]:
        n_common = round(n_words * share)
        common = text_of(rng, words, n_common)
        tails = [text_of(rng, words, n_words - n_common) for _ in range(n_streams)]
        return [Prompt(common + tail, n_out) for tail in tails]

    return make


def repeating(rng: random.Random, words: Sequence[str]) -> list[Prompt]:
    """One stream whose text repeats itself, and which the model continues: the case for speculation
    by lookup."""
    return [Prompt(text_of(rng, words, 24) * 6, 128)]


def joining(rng: random.Random, words: Sequence[str]) -> list[Prompt]:
    """A running stream, and a long prompt that joins when the first has sent 64 tokens."""
    running = Prompt(text_of(rng, words, 128), 900, end_with=1)
    return [running, Prompt(text_of(rng, words, 4000), 16, start_after=(0, 64))]


def stranger(rng: random.Random, words: Sequence[str]) -> list[Prompt]:
    """Eight conversations one after another, followed by an unrelated prompt."""
    before = [
        Prompt(text_of(rng, words, 700), 2, start_after=(number - 1, 1) if number else None)
        for number in range(8)
    ]
    return [*before, Prompt(text_of(rng, words, 128), 64, start_after=(7, 1))]


SHORTEST, LONGEST, COMMON = 20, 1200, 200
FEWEST_OUT, MOST_OUT = 16, 200
SHARE_OF_LONG = math.log(LONGEST / SHORTEST) / math.log(LONGEST / COMMON) / 3
"""Share of the prompts longer than the common prefix that begin with it; a third of all do."""


def arriving(
    count: int, rate: float | None
) -> Callable[[random.Random, Sequence[str]], list[Prompt]]:
    """`count` requests, `rate` of them a second on average (Poisson); without a rate all at once.

    Prompts have 20 to 1,200 words, log-uniformly distributed, and a third share a prefix; answers
    have 16 to 200 tokens.
    """

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


def text_of(rng: random.Random, words: Sequence[str], n_words: int) -> str:
    return "".join(" " + word for word in rng.choices(words, k=n_words))


def read_throughput(streams: list[TokenStream], prompts: list[Prompt]) -> Metrics:
    for stream, prompt in zip(streams, prompts, strict=True):
        _check_length(stream, prompt.n_out)
    first = min(stream.sent_s for stream in streams)
    last = max(stream.token_times_s[-1] for stream in streams)
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    ttfts = [stream.ttft_s for stream in streams]
    return {
        "output_tokens_per_s": sum(prompt.n_out for prompt in prompts) / (last - first),
        "ttft_p50_ms": percentile(ttfts, 50) * 1e3,
        "ttft_p95_ms": percentile(ttfts, 95) * 1e3,
        "itl_p50_ms": percentile(gaps, 50) * 1e3,
        "itl_p95_ms": percentile(gaps, 95) * 1e3,
        "itl_p99_ms": percentile(gaps, 99) * 1e3,
        "e2e_p50_ms": percentile([stream.e2e_s for stream in streams], 50) * 1e3,
        "e2e_p95_ms": percentile([stream.e2e_s for stream in streams], 95) * 1e3,
    }


def read_stranger(streams: list[TokenStream], prompts: list[Prompt]) -> Metrics:
    return read_throughput(streams[-1:], prompts[-1:])


def read_steady(streams: list[TokenStream], prompts: list[Prompt]) -> Metrics:
    """Figures while all streams run: from the last one's first token to the first one's last."""
    began = max(stream.token_times_s[0] for stream in streams)
    ended = min(stream.token_times_s[-1] for stream in streams)
    if ended <= began:
        raise BenchError("The streams never all ran at the same time.")
    n_tokens = sum(began < at <= ended for stream in streams for at in stream.token_times_s)
    steady = {"steady_tokens_per_s": n_tokens / (ended - began)}
    return read_throughput(streams, prompts) | steady


def _check_length(stream: TokenStream, n_out: int) -> None:
    counted = stream.n_tokens if stream.n_tokens is not None else len(stream.token_times_s)
    # If a server sends no usage, events are counted; it may hold back a token of incomplete text.
    if counted < n_out * 0.95 or counted > n_out:
        raise BenchError(f"A stream returned {counted} tokens instead of {n_out}.")


def read_join(streams: list[TokenStream], prompts: list[Prompt]) -> Metrics:
    running, *joiners = streams
    for joiner, prompt in zip(joiners, prompts[1:], strict=True):
        _check_length(joiner, prompt.n_out)
    joins = [(joiner.sent_s, joiner.token_times_s[0]) for joiner in joiners]
    times = running.token_times_s
    pairs = list(zip(times, times[1:], strict=False))
    idle = [later - earlier for earlier, later in pairs[1:] if later <= joins[0][0]]
    # A gap counts for a join if it overlaps it, however early it began.
    busy = [
        b - a for a, b in pairs if any(b > joined and a < answered for joined, answered in joins)
    ]
    if len(idle) < 8 or not busy:
        raise BenchError("The running stream ended before the long prompt was answered.")
    return {
        "idle_itl_p50_ms": percentile(idle, 50) * 1e3,
        "idle_itl_p95_ms": percentile(idle, 95) * 1e3,
        "join_itl_p50_ms": percentile(busy, 50) * 1e3,
        "join_itl_p95_ms": percentile(busy, 95) * 1e3,
        "join_itl_max_ms": max(busy) * 1e3,
        "join_ttft_ms": percentile([joiner.ttft_s for joiner in joiners], 50) * 1e3,
        "join_tokens_meanwhile": float(len(busy)),
    }


def by_name(*loads: Load) -> dict[str, Load]:
    return {load.name: load for load in loads}


LOADS = by_name(
    Load("streams1", STREAMS_SHAPE, distinct(1, 128, 64), read_throughput),
    Load("streams4", STREAMS_SHAPE, distinct(4, 128, 64), read_throughput),
    Load("streams16", STREAMS_SHAPE, distinct(16, 128, 64), read_throughput),
    Load("streams64", MANY_SHAPE, distinct(64, 128, 64), read_throughput, 600),
    Load("shared", STREAMS_SHAPE, shared(16, 512, 0.9, 32), read_throughput),
    Load("steady", STREAMS_SHAPE, shared(16, 512, 0.9, 128), read_steady, 300),
    *(
        Load(f"busy{n}", STREAMS_SHAPE, distinct(n, 128, 64), read_throughput, 600, busy=True)
        for n in (1, 4, 16)
    ),
    *(
        Load(name, STREAMS_SHAPE, distinct(16, 128, 64), read_throughput, sampling=name)
        for name in ("temperature", "nucleus", "logprobs")
    ),
    Load(
        "vocabulary",
        STREAMS_SHAPE,
        distinct(16, 128, 64),
        read_throughput,
        timeout_s=300,
        model=BIG_VOCABULARY,
        sampling="temperature",
    ),
    *(
        Load(f"{name}-{n}", None, distinct(n, 128, 64), read_throughput, 300, model=name)
        for name in (INSTRUCT, RANDOM)
        for n in (1, 4, 16)
    ),
    *(
        Load(f"guessed{n}", STREAMS_SHAPE, distinct(n, 128, 64), read_throughput, 300, GUESSABLE)
        for n in (1, 4, 16)
    ),
    *(
        Load(
            name,
            None,
            arriving(20, rate),
            read_throughput,
            900,
            model=INSTRUCT,
            divisible=True,
        )
        for name, rate in (
            ("arrivals", 0.5),
            ("arrivals-0.1", 0.1),
            ("arrivals-0.25", 0.25),
            ("arrivals-1", 1.0),
        )
    ),
    Load("repetition", None, repeating, read_throughput, 300, model=INSTRUCT),
    Load("stranger", None, stranger, read_stranger, 300, model=INSTRUCT),
    Load("join", JOIN_SHAPE, joining, read_join),
)


OPEN_SHAPE = Shape(slots=16, context_per_slot=1536)


def capacity_load(count: int) -> Load:
    """All requests at once, to measure how many a second a server can handle."""
    return Load("capacity", OPEN_SHAPE, arriving(count, None), read_throughput, timeout_s=600)


def open_load(percent: int, count: int, capacity: float) -> Load:
    """Requests at `percent` of a capacity a second, which come whether or not others are done."""
    make = arriving(count, capacity * percent / 100)
    return Load(f"open{percent}", OPEN_SHAPE, make, read_throughput, timeout_s=900)


def _completion(prompt: Prompt, model_id: str, sampling: dict[str, Any]) -> Request:
    body = {"prompt": prompt.text, "max_tokens": prompt.n_out, **sampling, "model": model_id}
    # A trained model would end at different tokens, and the work must be the same.
    body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    return request_of("/v1/completions", body, prompt)


def _job(prompt: Prompt, job_id: str, sampling: dict[str, Any]) -> Request:
    body = {"prompt": prompt.text, "max_tokens": prompt.n_out, **sampling, "job_id": job_id}
    return request_of("/execute", body | {"ignore_eos": True}, prompt)


def request_of(path: str, body: dict[str, Any], prompt: Prompt) -> Request:
    body |= prompt.fields
    return Request(path, body, prompt.at_s, prompt.start_after, end_with=prompt.end_with)


def read(load: Load, driven: Driven, prompts: list[Prompt]) -> Metrics:
    streams = [load.parse(recording) for recording in driven.recordings]
    metrics = load.reduce(streams, prompts)
    metrics["client_cpu_share"] = driven.client_cpu_s / driven.wall_s
    return metrics
