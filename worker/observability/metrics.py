"""The worker's metrics for Prometheus, in a registry of their own.

Belongs to the API process; all methods are cheap, thread-safe and never wait for the engine. Gauges
are set at a scrape; everything else is counted as it happens.
"""

# ruff: noqa: E501 - the gauges are a table, one a line
from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any, Literal, get_args

from worker.lean_imports import without_init

with without_init("prometheus_client"):  # its `__init__` imports HTTP servers
    from prometheus_client.metrics import Counter, Gauge, Histogram, disable_created_metrics
    from prometheus_client.registry import CollectorRegistry

Outcome = Literal["success", "error", "cancelled", "timeout"]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_DURATION_MS = (5, 10, 25, 50, 100, 250, 500, 1e3, 2.5e3, 5e3, 1e4, 3e4, 6e4, 1.2e5, 3e5, 6e5)
_WAIT_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
_CANCEL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_LOAD_SECONDS = (0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)


# Each with its help text and where a `WorkerStatus` has its value.
_GAUGES = (
    ("worker_uptime_seconds", "Since the start of the worker.", "uptime_seconds"),
    ("worker_ready", "1 when new work is accepted.", "is_ready"),
    ("worker_resident", "1 when residency on the device is proved.", "resident"),
    ("worker_requests_running", "Requests that hold a slot.", "running"),
    ("worker_queue_depth", "Accepted requests without a slot.", "queued"),
    ("worker_queue_prompt_tokens", "Prompt tokens of the queued requests.", "queued_prompt_tokens"),
    ("worker_kv_cells_used", "KV cells in use.", "stats.kv_cells_used"),
    ("worker_kv_cells_total", "KV cells there are.", "stats.kv_cells_total"),
    (
        "worker_kv_cells_cached",
        "Used KV cells that are kept only for reuse.",
        "stats.kv_cells_cached",
    ),
    (
        "worker_last_progress_ms",
        "Since the engine's last step while it has work.",
        "last_progress_ms",
    ),
    ("worker_last_load_seconds", "The last load of the model.", "load_seconds"),
    ("worker_engine_steps", "Batches computed since it started.", "stats.steps"),
    ("worker_engine_decode_seconds", "Time inside decode.", "stats.decode_seconds"),
    ("worker_engine_overhead_seconds", "Time around decode.", "stats.overhead_seconds"),
    ("worker_engine_sample_seconds", "Time inside sampling.", "stats.sample_seconds"),
    ("worker_engine_tokens_drafted", "Tokens that speculation guessed.", "stats.tokens_drafted"),
    ("worker_engine_tokens_accepted", "Guessed tokens that were right.", "stats.tokens_accepted"),
    ("worker_engine_kv_store_written_bytes", "Written to --kv-store.", "stats.kv_store_written"),
    (
        "worker_engine_kv_store_read_bytes",
        "Read from --kv-store to go on from.",
        "stats.kv_store_read",
    ),
    (
        "worker_engine_kv_store_evicted_bytes",
        "Removed from it for others.",
        "stats.kv_store_evicted",
    ),
    # The same facts under vLLM's names, which routers read.
    ("vllm:num_requests_waiting", "As worker_queue_depth.", "queued"),
    ("vllm:num_requests_running", "As worker_requests_running.", "running"),
)


class Metrics:
    """The worker's counters, histograms and gauges; one instance per process."""

    def __init__(self, worker_id: str) -> None:
        # Otherwise each counter adds a second series that nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._worker_id = worker_id
        self._count()
        self._measure()
        gauge = partial(Gauge, registry=self.registry)
        self._gauges = [(gauge(name, text), attrgetter(path)) for name, text, path in _GAUGES]
        self._router_usage = (
            gauge("vllm:kv_cache_usage_perc", "KV cells of running requests, of all; 1 is full."),
            gauge("vllm:gpu_cache_usage_perc", "As vllm:kv_cache_usage_perc."),
        )
        labels = ("block_size", "num_gpu_blocks")
        self._router_cache = gauge("vllm:cache_config_info", "1; a block is one KV cell.", labels)
        self._router_hit_rate = gauge(
            "vllm:gpu_prefix_cache_hit_rate",
            "Prompt tokens that were not computed again, of all since the start; 1 is all.",
        )
        self._vram = gauge(
            "worker_vram_bytes", "Bytes that the model holds on its device.", ("worker_id",)
        )

    def _count(self) -> None:
        counter = partial(Counter, registry=self.registry)
        self._requests = counter(
            "worker_requests_total", "Accepted requests that ended, by outcome.", ("outcome",)
        )
        for outcome in get_args(Outcome):
            self._requests.labels(outcome)
        self._rejected = counter(
            "worker_requests_rejected_total", "Requests refused before acceptance.", ("code",)
        )
        self._tokens_in = counter("worker_tokens_in_total", "Prompt tokens of accepted requests.")
        self._tokens_cached = counter(
            "worker_tokens_cached_total", "Prompt tokens that were not computed again."
        )
        # vLLM's older and newer names, from which its routers compute a hit rate.
        queries, hits = "Prompt tokens of started requests.", "As worker_tokens_cached_total."
        self._prefix_queries = (
            counter("vllm:prefix_cache_queries_total", queries),
            counter("vllm:gpu_prefix_cache_queries_total", queries),
        )
        self._prefix_hits = (
            counter("vllm:prefix_cache_hits_total", hits),
            counter("vllm:gpu_prefix_cache_hits_total", hits),
        )
        self._tokens_looked_up = 0
        self._tokens_found = 0
        self._tokens_out = counter("worker_tokens_generated_total", "Tokens sent to clients.")
        self._slow_readers = counter(
            "worker_slow_readers_total", "Clients cut because they stopped reading."
        )
        self._crashes = counter("worker_engine_crashes_total", "Engine processes that died.")
        self._respawns = counter("worker_engine_respawns_total", "Engine processes started anew.")
        self._quarantined = counter(
            "worker_requests_quarantined_total", "Requests refused after crashing the engine."
        )
        self._callback_failures = counter(
            "worker_callback_failures_total", "Ready callbacks that the pool did not accept."
        )
        self._heartbeats = counter("worker_heartbeats_total", "Heartbeats, by result.", ("result",))
        for result in ("sent", "failed"):
            self._heartbeats.labels(result)

    def _measure(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=self.registry)

        self._duration = histogram(
            "worker_inference_duration_ms", "Acceptance to the terminal event.", _DURATION_MS
        )
        self._queue_wait = histogram(
            "worker_queue_wait_seconds", "Acceptance to the first work on it.", _WAIT_SECONDS
        )
        self._first_token = histogram(
            "worker_time_to_first_token_seconds", "Acceptance to the first token.", _WAIT_SECONDS
        )
        self._inter_token = histogram(
            "worker_inter_token_seconds", "Between the tokens of a stream.", _STEP_SECONDS
        )
        self._cancel = histogram(
            "worker_cancel_latency_seconds",
            "Cancellation to the stream's terminal event.",
            _CANCEL_SECONDS,
        )
        self._load = histogram(
            "worker_model_load_seconds", "Engine start to its first decoded token.", _LOAD_SECONDS
        )

    # --- requests ------------------------------------------------------------------------

    def request_accepted(self, prompt_tokens: int) -> None:
        self._tokens_in.inc(prompt_tokens)

    def request_rejected(self, code: str) -> None:
        self._rejected.labels(code).inc()

    def request_started(
        self, queue_wait_seconds: float, *, prompt_tokens: int, cached_tokens: int
    ) -> None:
        self._queue_wait.observe(queue_wait_seconds)
        self._tokens_cached.inc(cached_tokens)
        for queries in self._prefix_queries:
            queries.inc(prompt_tokens)
        for hits in self._prefix_hits:
            hits.inc(cached_tokens)
        self._tokens_looked_up += prompt_tokens
        self._tokens_found += cached_tokens

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def tokens(self, n_tokens: int, seconds_each: float | None) -> None:
        """Count `n_tokens` sent; `seconds_each` is the time between them, `None` for the first."""
        self._tokens_out.inc(n_tokens)
        if seconds_each is not None:
            for _ in range(n_tokens):
                self._inter_token.observe(seconds_each)

    def request_ended(self, outcome: Outcome, duration_ms: float | None = None) -> None:
        self._requests.labels(outcome).inc()
        if duration_ms is not None:
            self._duration.observe(duration_ms)

    def request_cancelled(self, latency_seconds: float) -> None:
        self._cancel.observe(latency_seconds)

    def slow_reader_cut(self) -> None:
        self._slow_readers.inc()

    # --- engine and pool -----------------------------------------------------------------

    def engine_loaded(self, seconds: float) -> None:
        self._load.observe(seconds)

    def engine_crashed(self) -> None:
        self._crashes.inc()

    def engine_respawned(self) -> None:
        self._respawns.inc()

    def request_quarantined(self) -> None:
        self._quarantined.inc()

    def callback_failed(self) -> None:
        self._callback_failures.inc()

    def heartbeat(self, sent: bool) -> None:
        self._heartbeats.labels("sent" if sent else "failed").inc()

    # --- exposition ----------------------------------------------------------------------

    def exposition(self, status: Any) -> bytes:
        """The Prometheus text of all series; the gauges are those of a `WorkerStatus`."""
        from prometheus_client.exposition import generate_latest

        self._vram.labels(self._worker_id).set(status.vram_bytes)
        for gauge, value_in in self._gauges:
            gauge.set(float(value_in(status)))
        stats = status.stats
        in_use, total = stats.kv_cells_used - stats.kv_cells_cached, stats.kv_cells_total
        for gauge in self._router_usage:
            gauge.set(in_use / total if total else 0.0)
        self._router_hit_rate.set(self._tokens_found / max(self._tokens_looked_up, 1))
        self._router_cache.clear()
        self._router_cache.labels("1", str(total)).set(1)
        return generate_latest(self.registry)
