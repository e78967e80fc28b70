"""One `/metrics` for the whole fleet: labels say which worker and model each series belongs to.

Pure functions over Prometheus's own parser and writer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from worker.observability.logs import get_logger

log = get_logger()


def merged(texts: Mapping[tuple[str, str], str], keys: Mapping[str, int]) -> str:
    """Merge the expositions of all workers, by (worker, model), which become labels. `keys` are the
    gateway's own counts of requests by key name."""
    return generate_latest(_Families(texts, keys)).decode()


@dataclass
class _Families(Collector):
    texts: Mapping[tuple[str, str], str]
    keys: Mapping[str, int]

    def collect(self) -> Iterator[Metric]:
        """Each family once, with the samples of all workers."""
        families: dict[str, Metric] = {}
        for (worker, model), text in self.texts.items():
            try:
                found = list(text_string_to_metric_families(text))
            except ValueError as error:  # the other workers' metrics are unaffected
                log.warning("metrics.unreadable", worker=worker, reason=str(error))
                continue
            for read in found:
                family = families.setdefault(
                    read.name, Metric(read.name, read.documentation, read.type)
                )
                family.samples += [
                    sample._replace(labels={"worker": worker, "model": model, **sample.labels})
                    for sample in read.samples
                ]
        name = "worker_key_requests"  # the same name as in a worker
        for key, count in self.keys.items():
            family = families.setdefault(name, Metric(name, "Requests by key.", "counter"))
            labels = {"worker": "gateway", "model": "", "key": key}
            family.add_sample(f"{name}_total", labels, count)
        yield from families.values()
