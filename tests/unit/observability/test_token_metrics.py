"""The fast counters of each token equal the client library's own counter and histogram."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram

from worker.observability import metrics
from worker.observability.metrics import Metrics

EDGES = metrics._STEP_SECONDS
COUNTER, HISTOGRAM = "worker_tokens_generated_total", "worker_inter_token_seconds"
seconds = st.sampled_from(EDGES) | st.floats(0, 10, allow_nan=False) | st.none()


@given(st.lists(st.tuples(st.integers(1, 40), seconds)))
def test_tokens_are_counted_as_the_library_counts(frames: list[tuple[int, float | None]]) -> None:
    metrics, registry = Metrics("x"), CollectorRegistry()
    counter = Counter(COUNTER, "", registry=registry)
    histogram = Histogram(HISTOGRAM, "", registry=registry, buckets=EDGES)
    for n_tokens, seconds_each in frames:
        metrics.tokens(n_tokens, seconds_each)
        counter.inc(n_tokens)
        for _ in range(n_tokens if seconds_each is not None else 0):
            histogram.observe(seconds_each or 0.0)
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found = metrics.registry.get_sample_value(sample.name, sample.labels)
                assert found is not None, sample.name
                assert abs(found - sample.value) <= 1e-9 * max(sample.value, 1.0), sample.name
    assert metrics.buckets(HISTOGRAM)[-1] == (float("inf"), metrics.value(f"{HISTOGRAM}_count"))
