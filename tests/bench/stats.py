"""Percentiles, medians and paired ratios. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

Metrics = Mapping[str, float]


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks, as NumPy's default."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def medians(runs: Sequence[Metrics]) -> dict[str, float]:
    """The median of each metric over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: median(run[name] for run in runs if name in run) for name in names}


def paired_ratios(ours: Mapping[int, Metrics], theirs: Mapping[int, Metrics]) -> dict[str, float]:
    """The median over rounds of ours / theirs in the same round: drift of the machine cancels."""
    ratios: dict[str, list[float]] = {}
    for number, run in ours.items():
        other = theirs.get(number, {})
        for name, value in run.items():
            if other.get(name):
                ratios.setdefault(name, []).append(value / other[name])
    return {name: median(values) for name, values in ratios.items()}
