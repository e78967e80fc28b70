"""One exposition merged from many, read by Prometheus's own parser."""

from __future__ import annotations

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from tests.support.status import ready_status
from worker.fleet.metrics import merged
from worker.observability.metrics import Metrics


def exposition(running: int) -> str:
    metrics = Metrics("w")
    metrics.requests.labels("success").inc()
    return metrics.exposition(ready_status(running=running)).decode()


def test_every_series_of_every_worker_is_there_once() -> None:
    texts = {("a", "tiny"): exposition(1), ('b"\\', "tiny"): exposition(2)}
    families = list(text_string_to_metric_families(merged(texts, {"ann": 3})))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    own = {family.name: family for family in text_string_to_metric_families(exposition(1))}
    assert set(names) == set(own)
    for family in families:
        assert (family.type, family.documentation) == (
            own[family.name].type,
            own[family.name].documentation,
        )
        for worker in ("a", 'b"\\'):
            samples = [s for s in family.samples if s.labels["worker"] == worker]
            assert len(samples) == len(own[family.name].samples)
    running = next(f for f in families if f.name == "vllm:num_requests_running")
    assert {s.labels["worker"]: s.value for s in running.samples} == {"a": 1, 'b"\\': 2}
    keys = next(family for family in families if family.name == "worker_key_requests")
    assert keys.samples[-1].labels == {"worker": "gateway", "model": "", "key": "ann"}
    assert keys.samples[-1].value == 3
    assert merged({}, {}) == ""


@pytest.mark.parametrize("text", ["a{ 1", "a b", '{"error": {}}'])
def test_metrics_that_cannot_be_parsed_are_left_out(text: str) -> None:
    good = {("a", "tiny"): exposition(1)}
    with structlog.testing.capture_logs() as logs:
        assert merged({**good, ("b", "tiny"): text}, {}) == merged(good, {})
    assert [(each["event"], each["worker"]) for each in logs] == [("metrics.unreadable", "b")]
