"""Grafana's dashboard uses series and labels that a worker has."""

from __future__ import annotations

import json
import re
from itertools import combinations

import pytest

from builds.pins import FOLDER
from worker.observability.metrics import Metrics

DASHBOARD = json.loads((FOLDER / "deploy/grafana.json").read_text("utf-8"))
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
BY_PROMETHEUS = {"instance", "le"}
"""The labels that a scrape and a histogram add."""


def series() -> dict[str, set[str]]:
    """Return each series of a worker, with its own labels."""
    found: dict[str, set[str]] = {}
    metrics = Metrics("w")
    for collector, names in metrics.registry._collector_to_names.items():
        labels = set(getattr(collector, "_labelnames", ()))
        found |= {name: labels for name in names}
    return found


@pytest.mark.parametrize("title", PANELS)
def test_a_panel_uses_existing_series_and_labels(title: str) -> None:
    known = series()
    for target in PANELS[title]["targets"]:
        names = re.findall(r"\b((?:worker_|vllm:)\w+)\{", target["expr"])
        assert names and set(names) <= known.keys(), target["expr"]
        labels = set().union(*(known[name] for name in names)) | BY_PROMETHEUS
        grouped = re.findall(r"by \((\w+)\)", target["expr"])
        shown = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert {*grouped, *shown} <= labels, target["expr"]


def test_panels_fit_the_grid() -> None:
    def apart(a: dict[str, int], b: dict[str, int]) -> bool:
        across = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        return across or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]

    places = [panel["gridPos"] for panel in PANELS.values()]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert all(apart(a, b) for a, b in combinations(places, 2))
    assert len({panel["id"] for panel in PANELS.values()}) == len(PANELS)
