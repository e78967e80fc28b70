"""`llorch-cpu bench`: measures the speed of a model on this machine with a real worker.

Starts a worker with the same settings as a child, on a free port of this machine, and streams
answers to unrelated prompts: 1, then 4, then 16 at once. The rate is the number of generated tokens
divided by the time from the first request's submission to the last token's arrival, which includes
the prompts' time; the time to the first token is what each client waited. Each load has one round,
after one request that is not counted, so figures vary by a few percent.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import httpx
from rich.live import Live
from rich.table import Table

from worker.commands.console import Console
from worker.commands.served import disconnected, headers_of, own_worker
from worker.errors import ConfigError, WorkerError
from worker.settings import Settings

_LOADS = (1, 4, 16)
_PROMPT_WORDS = 64
_TOKENS_OUT = 48
_WORDS = (
    "river stone market winter letter engine garden paper signal copper morning island "
    "question harbour velvet number thunder window castle orange silver planet forest music"
).split()


@dataclass(frozen=True, slots=True)
class Result:
    """The result at one load. Times are medians over the streams, in milliseconds."""

    streams: int
    tokens_per_second: float
    """The rate of all streams together."""
    first_token_ms: float
    """Time from the submission to the first text."""
    inter_token_ms: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class _Stream:
    prompt_tokens: int
    output_tokens: int
    first_token_s: float
    seconds: float


def run(settings: Settings, *, as_json: bool) -> int:
    """Measure, and print a line for each load.

    Raises:
        WorkerError: the worker did not start, or a request failed.
        ConfigError: a worker with these settings refuses the benchmark's requests.
    """
    with own_worker(settings, n_slots=_LOADS[-1]) as (url, ready):
        title = f"{ready['model_ref']} on {ready['device']}, loaded in {ready['seconds']} s"
        table = Table("streams", "tok/s", "first token", "between tokens", title=title)
        for column in table.columns:
            column.justify = "right"
        console = Console(quiet=as_json)
        results = asyncio.run(_measure(url, settings, Live(table, console=console), table))
        if not console.is_terminal:
            console.line()  # rich does so only on a terminal
    if as_json:
        print(json.dumps(ready | {"loads": [asdict(result) for result in results]}, indent=2))
    return 0


async def _measure(url: str, settings: Settings, live: Live, table: Table) -> list[Result]:
    """Warm up with one request, then measure each load and show its row."""
    timeout = httpx.Timeout(None, connect=10)
    async with httpx.AsyncClient(
        base_url=url, headers=headers_of(settings), timeout=timeout, trust_env=False
    ) as client:
        words = random.Random(0)
        await _stream(client, words, 8)
        results = []
        with live:
            for n_streams in _LOADS:
                began = time.monotonic()
                streams = await asyncio.gather(
                    *(_stream(client, words, _TOKENS_OUT) for _ in range(n_streams))
                )
                results.append(_result(streams, time.monotonic() - began))
                table.add_row(*_row(results[-1]))
        return results


def _row(result: Result) -> tuple[str, ...]:
    return (
        str(result.streams),
        f"{result.tokens_per_second:.1f}",
        f"{result.first_token_ms:.0f} ms",
        f"{result.inter_token_ms:.1f} ms",
    )


def _result(streams: list[_Stream], seconds: float) -> Result:
    n_tokens = sum(each.output_tokens for each in streams)
    between = [
        1000 * (each.seconds - each.first_token_s) / max(each.output_tokens - 1, 1)
        for each in streams
    ]
    return Result(
        streams=len(streams),
        tokens_per_second=round(n_tokens / seconds, 1),
        first_token_ms=round(1000 * median(each.first_token_s for each in streams), 1),
        inter_token_ms=round(median(between), 2),
        prompt_tokens=sum(each.prompt_tokens for each in streams),
        output_tokens=n_tokens,
    )


async def _stream(client: httpx.AsyncClient, words: random.Random, max_tokens: int) -> _Stream:
    body = {
        "job_id": f"bench-{words.getrandbits(64):x}",
        "prompt": " ".join(words.choices(_WORDS, k=_PROMPT_WORDS)),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    began = time.monotonic()
    first_s: float | None = None
    last: dict[str, Any] = {}
    started: dict[str, Any] = {}
    accept = {"Accept": "application/x-ndjson"}
    try:
        async with client.stream("POST", "/v1/inference", json=body, headers=accept) as response:
            async for line in response.aiter_lines():
                last = json.loads(line)
                if last.get("type") == "started":
                    started = last
                if last.get("type") == "token" and first_s is None:
                    first_s = time.monotonic() - began
    except httpx.HTTPError as error:
        raise disconnected(error) from error
    seconds = time.monotonic() - began
    if last.get("type") != "end" or first_s is None:
        # Status 400 means that the settings or the model do not allow it.
        kind = ConfigError if response.status_code == 400 else WorkerError
        raise kind(f"A request of the benchmark failed: {last.get('message', last)}.")
    return _Stream(started["prompt_tokens"], last["tokens_out"], first_s, seconds)
