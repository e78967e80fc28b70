"""Percentiles, medians and paired ratios. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, sqrt
from statistics import median, stdev

Metrics = Mapping[str, float]
_PAIRS_FOR_AN_ERROR = 4


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
    """The median over rounds of ours / theirs in each, so that drift of the machine cancels."""
    return {name: median(ratios) for name, ratios in _pairs(ours, theirs).items()}


def paired_errors(ours: Mapping[int, Metrics], theirs: Mapping[int, Metrics]) -> dict[str, float]:
    """The standard error of the mean logarithm of these ratios, if there are four pairs: for ratios
    near 1 this is the error of the ratio itself."""
    return {
        name: stdev(map(log, ratios)) / sqrt(len(ratios))
        for name, ratios in _pairs(ours, theirs).items()
        if len(ratios) >= _PAIRS_FOR_AN_ERROR and min(ratios) > 0
    }


def _pairs(ours: Mapping[int, Metrics], theirs: Mapping[int, Metrics]) -> dict[str, list[float]]:
    ratios: dict[str, list[float]] = {}
    for number, run in ours.items():
        other = theirs.get(number, {})
        for name, value in run.items():
            if other.get(name):
                ratios.setdefault(name, []).append(value / other[name])
    return ratios
