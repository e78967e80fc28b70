"""`llorch-cpu bench`: what this machine gives with this model, measured on a real worker.

Starts the worker with the same settings on a free port of this machine, as a child, and streams
prompts that have nothing in common through it: 1, then 4, then 16 at once. The rate counts every
token from the first request's submission to the last token's arrival, prompts' time included; the
time to the first token is what each client waited. One round at each load, after one request that
is not counted, so figures vary by some percent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import IO, Any

import httpx

from worker.errors import WorkerError, rebuild_error
from worker.setting_faults import ENV_PREFIX, variable_of
from worker.settings import BACKEND_FIELDS, FIELDS, Settings, group_of

_LOADS = (1, 4, 16)
_PROMPT_WORDS = 64
_TOKENS_OUT = 48
_WORDS = (
    "river stone market winter letter engine garden paper signal copper morning island "
    "question harbour velvet number thunder window castle orange silver planet forest music"
).split()


@dataclass(frozen=True, slots=True)
class Result:
    """The result at one load. Times are medians over its streams, in milliseconds."""

    streams: int
    tokens_per_second: float
    """Of all streams together."""
    first_token_ms: float
    """From the submission to the first text."""
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
    """Measure and print a line for each load.

    Raises:
        WorkerError: the worker did not start; its own message is on stderr.
    """
    with _worker(settings) as (url, ready):
        if not as_json:
            print(f"{ready['model_ref']} on {ready['device']}, loaded in {ready['seconds']} s")
            print(f"{'streams':>8}{'tok/s':>10}{'first token':>14}{'between tokens':>17}")
        results = asyncio.run(_measure(url, settings, shown=not as_json))
    if as_json:
        print(json.dumps(ready | {"loads": [asdict(result) for result in results]}, indent=2))
    return 0


async def _measure(url: str, settings: Settings, *, shown: bool) -> list[Result]:
    token = settings.worker_token
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = httpx.Timeout(None, connect=10)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=timeout, trust_env=False
    ) as client:
        words = random.Random(0)
        await _stream(client, words, 8)
        results = []
        for n_streams in _LOADS:
            began = time.monotonic()
            streams = await asyncio.gather(
                *(_stream(client, words, _TOKENS_OUT) for _ in range(n_streams))
            )
            seconds = time.monotonic() - began
            results.append(_result(streams, seconds))
            if shown:
                print(_row(results[-1]), flush=True)
        return results


def _row(result: Result) -> str:
    return (
        f"{result.streams:>8}{result.tokens_per_second:>10.1f}"
        f"{result.first_token_ms:>11.0f} ms{result.inter_token_ms:>14.1f} ms"
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
    async with client.stream("POST", "/v1/inference", json=body, headers=accept) as response:
        async for line in response.aiter_lines():
            last = json.loads(line)
            if last.get("type") == "started":
                started = last
            if last.get("type") == "token" and first_s is None:
                first_s = time.monotonic() - began
    seconds = time.monotonic() - began
    if last.get("type") != "end" or first_s is None:
        raise WorkerError(f"A request of the benchmark failed: {last.get('message', last)}.")
    return _Stream(started["prompt_tokens"], last["tokens_out"], first_s, seconds)


@contextlib.contextmanager
def _worker(settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start a worker with these settings; gives its address and what its ready line says of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"from worker.cli import {settings.backend} as run; run()"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(settings),
    )
    assert process.stderr is not None
    try:
        ready = _wait_until_ready(process.stderr)
        threading.Thread(target=process.stderr.read, daemon=True).start()  # empties the pipe
        yield ready["uri"], {key: ready[key] for key in ("model_ref", "device", "seconds")}
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()


def _environment(settings: Settings) -> dict[str, str]:
    """The settings as variables: what is served is the same, with a slot for each stream, for no
    pool, at an address of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    own = {"host": "127.0.0.1", "port": 0, "log_format": "json"}
    own |= {"slots": max(settings.engine.slots, _LOADS[-1]), "worker_token": settings.worker_token}
    for name, info in FIELDS.items():
        value = own.get(name, getattr(settings, name))
        is_served = group_of(info) not in ("server", "pool") or name in own
        is_ours = BACKEND_FIELDS.get(name, settings.backend) == settings.backend
        if is_served and is_ours and value is not None:
            kept[variable_of(name)] = str(value)
    return kept


def _wait_until_ready(log: IO[str]) -> dict[str, Any]:
    failure: dict[str, Any] = {}
    for line in log:
        event = json.loads(line) if line.startswith("{") else {}
        if event.get("event") == "worker.ready":
            return dict(event)
        if event.get("event") == "worker.failed":
            failure = event
    raise rebuild_error(failure, WorkerError)
