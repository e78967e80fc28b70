"""The reports of other load generators are read by their own names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.errors import BenchError
from tools.bench.generators.__main__ import aiperf_metrics, guidellm_metrics

EXPECTED = {
    "output_tokens_per_s": 88.2,
    "ttft_p50_ms": 150.0,
    "ttft_p95_ms": 290.0,
    "itl_p50_ms": 12.5,
    "itl_p95_ms": 14.0,
    "e2e_p50_ms": 900.0,
    "e2e_p95_ms": 1000.0,
}


def test_aiperf(tmp_path: Path) -> None:
    found = {
        "request_count": {"avg": 12},
        "output_token_throughput": {"avg": 88.2},
        "time_to_first_token": {"p50": 150.0, "p95": 290.0},
        "inter_token_latency": {"p50": 12.5, "p95": 14.0},
        "request_latency": {"p50": 900.0, "p95": 1000.0},
    }
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(found), "utf-8")
    assert aiperf_metrics(tmp_path) == EXPECTED


def guidellm_report(folder: Path, errored: int) -> None:
    def spread(median: float, p95: float) -> dict[str, object]:
        return {"successful": {"median": median, "mean": median, "percentiles": {"p95": p95}}}

    metrics = {
        "output_tokens_per_second": spread(88.2, 0.0),
        "time_to_first_token_ms": spread(150.0, 290.0),
        "inter_token_latency_ms": spread(12.5, 14.0),
        "request_latency": spread(0.9, 1.0),
    }
    totals = {"successful": 12, "errored": errored}
    found = {"benchmarks": [{"request_totals": totals, "metrics": metrics}]}
    (folder / "report.json").write_text(json.dumps(found), "utf-8")


def test_guidellm(tmp_path: Path) -> None:
    guidellm_report(tmp_path, errored=0)
    assert guidellm_metrics(tmp_path) == pytest.approx(EXPECTED)


def test_failed_requests_are_not_measured(tmp_path: Path) -> None:
    guidellm_report(tmp_path, errored=1)
    with pytest.raises(BenchError, match="'errored': 1"):
        guidellm_metrics(tmp_path)
