"""The table and the JSON: medians over rounds, and ratios of runs in the same round."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tools.bench.stats import Metrics, medians, paired_errors, paired_ratios
from worker.devices.machine import cpu_model

Results = dict[str, dict[str, dict[int, Metrics]]]
"""load → subject → round → metrics"""

LIMIT = "limit"
REFERENCE = "llama-server"
BEFORE = "before"
"""The name of another checkout's worker."""
ROWS = {
    "startup_s": "start-up, s",
    "rss_peak_mib": "peak RSS, MiB",
    "pss_mib": "PSS after load, MiB",
    "output_tokens_per_s": "output tok/s",
    "texts_per_s": "texts/s",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p95_ms": "TTFT p95, ms",
    "later_ttft_p50_ms": "TTFT p50 of the turns after the first, ms",
    "prefix_hit_rate": "prompt tokens of these turns that were cached",
    "itl_p50_ms": "inter-token p50, ms",
    "itl_p95_ms": "inter-token p95, ms",
    "itl_p99_ms": "inter-token p99, ms",
    "e2e_p50_ms": "end-to-end p50, ms",
    "e2e_p95_ms": "end-to-end p95, ms",
    "steady_tokens_per_s": "output tok/s while all run",
    "idle_itl_p50_ms": "inter-token p50 before, ms",
    "idle_itl_p95_ms": "inter-token p95 before, ms",
    "join_itl_p50_ms": "inter-token p50 meanwhile, ms",
    "join_itl_p95_ms": "inter-token p95 meanwhile, ms",
    "join_itl_max_ms": "inter-token max meanwhile, ms",
    "join_ttft_ms": "TTFT of what joins, ms",
    "again_ttft_ms": "TTFT of a second question, ms",
    "again_share": "that over TTFT of the first",
    "step_overhead_ms": "own cost per step, ms",
    "cancel_queued_ms": "cancel of a queued job → room free, ms",
    "cancel_prefill_ms": "cancel in prefill → cells free, ms",
    "cancel_decode_ms": "cancel in decode → cells free, ms",
    "disconnect_queued_ms": "disconnect when queued → room free, ms",
    "disconnect_prefill_ms": "disconnect in prefill → cells free, ms",
    "disconnect_decode_ms": "disconnect in decode → cells free, ms",
}
FOREIGN_LIMIT = 0.1
"""Number of cores that other programs may use before figures count as disturbed."""


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "threads": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def summarise(results: Results, names: Sequence[str]) -> dict[str, Any]:
    """Per load and subject, in the order of `names`: medians, and ratios to llama-server (else to
    the other checkout's worker, else to the first subject) and to the limit."""
    baseline = names[0] if names else None
    reference = next((name for name in (REFERENCE, BEFORE) if name in names), baseline)
    summary: dict[str, Any] = {}
    for load, subjects in results.items():
        rows: dict[str, Any] = {}
        for name in (*names, LIMIT):
            runs = subjects.get(name)
            if runs is None:
                continue
            entry: dict[str, Any] = {"medians": medians(list(runs.values())), "rounds": len(runs)}
            for other in (reference, LIMIT):
                if other in subjects and other != name:
                    entry[f"ratio_to_{other}"] = paired_ratios(runs, subjects[other])
                    entry[f"error_to_{other}"] = paired_errors(runs, subjects[other])
            rows[name] = entry
        summary[load] = rows
    return {"baseline": baseline, "reference": reference, "loads": summary}


def table(summary: Mapping[str, Any]) -> str:
    """Markdown with a row per load and metric, a column per subject, then ratios with their
    standard errors if there are enough pairs: the baseline's, or those to it if it is the
    reference.

    The shares of the cores are only in the JSON.
    """
    baseline, reference = summary["baseline"], summary["reference"]
    loads: Mapping[str, Any] = summary["loads"]
    names = list(dict.fromkeys(name for rows in loads.values() for name in rows))
    subjects = [name for name in names if name != LIMIT]
    pairs = [(baseline, reference)] * (reference in names)
    if reference == baseline:
        pairs = [(name, baseline) for name in subjects if name != baseline]
    pairs += [(baseline, LIMIT)] * (LIMIT in names)
    heads = ["load", "metric", *names, *(f"{ours} / {theirs}" for ours, theirs in pairs)]
    lines = [_row(heads), _row(["---", "---", *["---:"] * (len(heads) - 2)])]
    for load, rows in loads.items():
        found = dict.fromkeys(key for entry in rows.values() for key in entry["medians"])
        for metric in (name for name in ROWS if name in found):
            cells = [_number(rows.get(name, {}).get("medians", {}).get(metric)) for name in names]
            for ours, theirs in pairs:
                entry = rows.get(ours, {})
                ratio = _number(entry.get(f"ratio_to_{theirs}", {}).get(metric))
                error = entry.get(f"error_to_{theirs}", {}).get(metric)
                cells.append(ratio if error is None else f"{ratio} ± {error:.3f}")
            lines.append(_row([load, ROWS[metric], *cells]))
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def disturbed(results: Results) -> list[str]:
    """The loads during which other programs used the machine."""
    names = []
    for load, subjects in results.items():
        shares = [
            run["foreign_cpu_share"]
            for runs in subjects.values()
            for run in runs.values()
            if "foreign_cpu_share" in run
        ]
        if shares and max(shares) > FOREIGN_LIMIT:
            names.append(f"{load} (up to {max(shares):.2f} cores)")
    return names


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.rename(path)
