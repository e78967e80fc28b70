"""The worker's metrics for Prometheus, in a registry of their own.

Belongs to the API process. Events are counted where they occur, from any thread; gauges are set at
a scrape. Nothing here waits for the engine.
"""

# ruff: noqa: E501 - the series are tables, one a line
from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal, get_args

from worker.errors import WorkerError
from worker.lean_imports import without_init
from worker.wire.messages import CacheTier

with without_init("prometheus_client"):  # its `__init__` imports HTTP servers
    from prometheus_client.metrics import Counter, Gauge, Histogram, disable_created_metrics
    from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import CollectorRegistry
    from prometheus_client.utils import floatToGoString

Outcome = Literal["success", "error", "cancelled", "timeout"]
Cut = Literal[
    "no_http", "large_head", "unknown_coding", "slow_request", "too_many", "unread_answer"
]
"""Why a client was disconnected."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_DURATION_MS = (5, 10, 25, 50, 100, 250, 500, 1e3, 2.5e3, 5e3, 1e4, 3e4, 6e4, 1.2e5, 3e5, 6e5)
_WAIT_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_CANCEL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LOAD_SECONDS = (0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)


_CACHE_NAMES = ("prefix_cache", "gpu_prefix_cache")

# Name, help text, and the attribute of a `WorkerStatus` that has the value.
# fmt: off
_GAUGES = (
    ("worker_uptime_seconds", "Seconds since the start of the worker.", "uptime_seconds"),
    ("worker_ready", "1 when new work is accepted.", "is_ready"),
    ("worker_resident", "1 when residency on the device is proven.", "resident"),
    ("worker_requests_running", "Requests that hold a slot, or share one with others (embeddings).", "running"),
    ("worker_queue_depth", "Requests that wait for a slot, including preempted ones.", "queued"),
    ("worker_queue_prompt_tokens", "Prompt tokens of the queued requests.", "queued_prompt_tokens"),
    ("worker_kv_cells_used", "KV cells in use.", "stats.kv_cells_used"),
    ("worker_kv_cells_total", "All KV cells.", "stats.kv_cells_total"),
    ("worker_kv_cells_cached", "Used KV cells that are kept only for reuse.", "stats.kv_cells_cached"),
    ("worker_last_progress_ms", "Milliseconds since the engine's last step, while it has work.", "last_progress_ms"),
    ("worker_last_load_seconds", "Duration of the last load of the model.", "load_seconds"),
    ("worker_engine_steps", "Batches computed since the start of the engine process.", "stats.steps"),
    ("worker_engine_decode_seconds", "Seconds inside decode.", "stats.decode_seconds"),
    ("worker_engine_overhead_seconds", "Seconds of steps outside decode and sampling.", "stats.overhead_seconds"),
    ("worker_engine_sample_seconds", "Seconds inside sampling.", "stats.sample_seconds"),
    ("worker_engine_media_encoded", "Chunks of pictures and sounds that the projector encoded.", "stats.media_encoded"),
    ("worker_engine_encode_seconds", "Seconds inside the projector.", "stats.encode_seconds"),
    ("worker_engine_tokens_drafted", "Tokens that speculation guessed.", "stats.tokens_drafted"),
    ("worker_engine_tokens_accepted", "Guessed tokens that were right.", "stats.tokens_accepted"),
    # The same facts under vLLM's names, which routers read.
    ("vllm:num_requests_waiting", "As worker_queue_depth.", "queued"),
    ("vllm:num_requests_running", "As worker_requests_running.", "running"),
    ("vllm:kv_cache_usage_perc", "Share of all KV cells that running requests use; 1 is full.", "kv_usage"),
    ("vllm:gpu_cache_usage_perc", "As vllm:kv_cache_usage_perc.", "kv_usage"),
)
# fmt: on


class _Tokens:
    """Counts every token of every stream. The client library's counter and histogram would take
    several times as long because of their locks."""

    def __init__(self) -> None:
        self._n_tokens, self._seconds = 0, 0.0
        self._n_between = [0] * (len(_STEP_SECONDS) + 1)
        """Number of tokens per bucket of the time before them; the last is for longer times."""

    def add(self, n_tokens: int, seconds_each: float | None) -> None:
        """Count new tokens; `seconds_each` is the time before each, `None` for a stream's first."""
        self._n_tokens += n_tokens
        if seconds_each is not None:
            self._n_between[bisect_left(_STEP_SECONDS, seconds_each)] += n_tokens
            self._seconds += n_tokens * seconds_each

    def collect(self) -> Iterator[Metric]:
        edges = map(floatToGoString, (*_STEP_SECONDS, float("inf")))
        buckets = [*zip(edges, accumulate(self._n_between), strict=True)]
        # fmt: off
        yield CounterMetricFamily("worker_tokens_generated", "Generated tokens as usage counts them, including those of a matched stop and the end-of-generation token.", self._n_tokens)
        yield HistogramMetricFamily("worker_inter_token_seconds", "Time between the tokens of a stream.", buckets, self._seconds)
        # fmt: on

    describe = collect


class Metrics:
    """The worker's counters, histograms and gauges; one instance per process."""

    def __init__(self, worker_id: str, n_adapters: int = 0) -> None:
        # Otherwise each counter adds a second series, with its creation time, that nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._worker_id, self._n_adapters = worker_id, n_adapters
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        # fmt: off
        self.requests = counter("worker_requests_total", "Accepted requests to generate, embed or rank that have ended, by outcome; each choice of an answer counts as one.", ("outcome",))
        self.rejected = counter("worker_requests_rejected_total", "Requests answered with an error before they were accepted, by error code.", ("code",))
        self.keys = counter("worker_key_requests_total", "Requests with a key of --api-key-file, by the key's name.", ("key",))
        self.quarantined = counter("worker_requests_quarantined_total", "Requests refused because they had crashed the engine.")
        self.tokens_in = counter("worker_tokens_in_total", "Prompt tokens of accepted requests as usage counts them: once for all choices of a prompt.")
        self.slow_readers = counter("worker_slow_readers_total", "Clients disconnected because they stopped reading.")
        self.cut_off = counter("worker_connections_cut_total", "Connections refused or closed before a request was read or its answer was taken, by reason.", ("reason",))
        self.crashes = counter("worker_engine_crashes_total", "Engine processes that died.")
        self.respawns = counter("worker_engine_respawns_total", "Engine processes started to replace one that died.")
        self.callback_failures = counter("worker_callback_failures_total", "Ready callbacks that the pool did not accept.")
        self.heartbeats = counter("worker_heartbeats_total", "Heartbeats, by result.", ("result",))

        self.duration_ms = histogram("worker_inference_duration_ms", "From acceptance to the terminal event.", buckets=_DURATION_MS)
        self.queue_wait = histogram("worker_queue_wait_seconds", "From acceptance to the start of work on the request.", buckets=_WAIT_SECONDS)
        self.first_token = histogram("worker_time_to_first_token_seconds", "From acceptance to the first token.", buckets=_WAIT_SECONDS)
        self.cancel = histogram("worker_cancel_latency_seconds", "From a request's cancellation until the engine has freed its cells.", buckets=_CANCEL_SECONDS)
        self.load = histogram("worker_model_load_seconds", "From the engine's start to its first decoded token.", buckets=_LOAD_SECONDS)

        tokens = _Tokens()
        self.registry.register(tokens)
        self.tokens = tokens.add
        # vLLM's older and newer names, from which its routers compute a hit rate.
        queries, hits = "Those of worker_tokens_in_total whose requests have started.", "As worker_tokens_cached_total."
        self._queries = [counter(f"vllm:{name}_queries_total", queries) for name in _CACHE_NAMES]
        self._hits = [counter(f"vllm:{name}_hits_total", hits) for name in _CACHE_NAMES]
        self._hits.append(counter("worker_tokens_cached_total", "Prompt tokens that were not computed again."))
        self.reused = counter("worker_tokens_reused_total", "As worker_tokens_cached_total, by where the tokens were kept.", ("tier",))
        self._hit_rate = gauge("vllm:gpu_prefix_cache_hit_rate", "Share of all prompt tokens since the start that were not computed again; 1 is all.")
        self._gauges = [(gauge(name, text), attrgetter(path)) for name, text, path in _GAUGES]
        self._cache = gauge("vllm:cache_config_info", "1; a block is one KV cell.", ("block_size", "num_gpu_blocks"))
        self._adapters = gauge("vllm:lora_requests_info", "Unix time of this scrape; labels: LoRA adapters of running and of waiting requests, and how many are loaded.", ("max_lora", "running_lora_adapters", "waiting_lora_adapters"))
        self._vram = gauge("worker_vram_bytes", "Bytes that the model takes on its device.", ("worker_id",))
        # fmt: on
        # Start all series at 0: a rate misses the first increment of a series that begins at 1.
        for outcome in get_args(Outcome):
            self.requests.labels(outcome)
        for error in WorkerError.__subclasses__():
            if error.status != WorkerError.status or error.retriable:  # a request can meet it
                self.rejected.labels(error.code)
        for tier in get_args(CacheTier):
            self.reused.labels(tier)
        for reason in get_args(Cut):
            self.cut_off.labels(reason)
        for result in ("sent", "failed"):
            self.heartbeats.labels(result)

    def connection_cut(self, reason: Cut) -> None:
        self.cut_off.labels(reason).inc()
        if reason == "unread_answer":
            self.slow_readers.inc()

    def looked_up(self, prompt_tokens: int, cached_tokens: int, tier: str) -> None:
        """Count the prompt of a started request; `cached_tokens` of it were found in `tier`."""
        for queries in self._queries:
            queries.inc(prompt_tokens)
        for hits in self._hits:
            hits.inc(cached_tokens)
        self.reused.labels(tier).inc(cached_tokens)

    def value(self, name: str, **labels: str) -> float:
        """The value of one series; 0 if it does not exist."""
        return float(self.registry.get_sample_value(name, labels) or 0.0)

    def buckets(self, name: str) -> tuple[tuple[float, float], ...]:
        """Each upper edge of a histogram, and the number of observations up to it."""
        (metric,) = self.registry.restricted_registry([f"{name}_bucket"]).collect()
        return tuple((float(each.labels["le"]), each.value) for each in metric.samples)

    def exposition(self, status: Any) -> bytes:
        """The Prometheus text of all series, with gauges from a `WorkerStatus`."""
        from prometheus_client.exposition import generate_latest

        self._vram.labels(self._worker_id).set(status.vram_bytes)
        for gauge, value_in in self._gauges:
            gauge.set(float(value_in(status)))
        n_queries = self.value("vllm:prefix_cache_queries_total")
        self._hit_rate.set(self.value("worker_tokens_cached_total") / max(n_queries, 1))
        self._cache.clear()
        self._cache.labels("1", str(status.stats.kv_cells_total)).set(1)
        if self._n_adapters:
            names = (",".join(each) for each in (status.running_adapters, status.waiting_adapters))
            self._adapters.clear()
            self._adapters.labels(str(self._n_adapters), *names).set(time.time())
        return generate_latest(self.registry)
