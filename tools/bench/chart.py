"""Draws how the worker compares with llama-server: `python -m tools.bench.chart SVG FIGURES...`,
or `--chart SVG` for the figures of a run.

There is a bar for each load and metric; longer is better for the worker: tokens a second are
ours over theirs, times theirs over ours. The thin line of a bar is the standard error. The picture
follows the reader's light or dark colour scheme.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench.report import REFERENCE

METRICS = {
    "output_tokens_per_s": ("tokens a second", 1),
    "texts_per_s": ("texts a second", 1),
    "ttft_p50_ms": ("first token", -1),
    "itl_p99_ms": ("slowest token of 100", -1),
}
"""A row's label, and the exponent of ours / theirs that makes larger mean better for the worker."""
LOADS = {
    "streams1": "1 stream",
    "streams4": "4 streams",
    "streams16": "16 streams",
    "shared": "16 streams, one beginning",
    "arrivals": "arrivals as users send them",
    "join": "a long prompt joins",
    "schema1": "a schema of ten keys",
    "schema16": "the schema, 16 streams",
    "call1": "a forced call",
    "edit": "a file is edited",
    "quote": "a document is quoted",
    "chat": "a chat",
    "embed1": "embeddings, one caller",
    "embed8": "embeddings, eight callers",
    "embed32": "embeddings, batches of 32",
    "rank32": "32 texts ranked",
}
"""Loads with a label of their own; all others use the benchmark's name."""
ROW, TOP, LEFT, WIDTH, RIGHT = 20, 44, 330, 420, 70
STYLE = """\
text{font:13px system-ui,sans-serif;fill:#1f2328}.grey{fill:#59636e}
rect{fill:#0969da}rect.behind{fill:#bc4c00}
line{stroke:#59636e}line.one{stroke:#1f2328;stroke-dasharray:3 3}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.grey{fill:#9198a1}rect{fill:#4493f8}
rect.behind{fill:#db6d28}line{stroke:#9198a1}line.one{stroke:#f0f6fc}}"""


class Row(NamedTuple):
    name: str
    metric: str
    ratio: float
    """Ratio to llama-server's figure, which is 1."""
    error: float
    """The standard error of the ratio's logarithm; 0 if it is unknown."""


def rows_of(summary: Mapping[str, Any]) -> Iterator[Row]:
    for load, subjects in summary["loads"].items():
        entry = subjects.get("worker", {})
        ratios = entry.get(f"ratio_to_{REFERENCE}", {})
        errors = entry.get(f"error_to_{REFERENCE}", {})
        for metric, (name, power) in METRICS.items():
            if metric in ratios:
                ratio = ratios[metric] ** power
                yield Row(LOADS.get(load, load), name, ratio, errors.get(metric, 0.0))


def svg(rows: list[Row]) -> str:
    longest = max((row.ratio * (1 + row.error) for row in rows), default=1.0)
    scale = WIDTH / max(longest, 1.0)
    bottom = TOP + ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + RIGHT}" '
        f'height="{bottom + 12}" role="img">',
        "<title>The worker beside llama-server, for each load</title>",
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT + scale:.0f}" y="24" text-anchor="middle" class="grey">'
        "llama-server = 1; longer is better</text>",
    ]
    before = None
    for place, row in enumerate(rows):
        y = TOP + ROW * place
        if row.name != before:
            parts.append(f'<text x="0" y="{y + 13}">{escape(row.name)}</text>')
            before = row.name
        kind = "behind" if row.ratio < 1 else "ahead"
        end = LEFT + scale * row.ratio
        reach = scale * row.ratio * row.error
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end" class="grey">'
            f"{escape(row.metric)}</text>",
            f'<rect class="{kind}" x="{LEFT}" y="{y + 3}" width="{end - LEFT:.1f}" height="12"/>',
            f'<line x1="{end - reach:.1f}" x2="{end + reach:.1f}" y1="{y + 9}" y2="{y + 9}"/>',
            f'<text x="{end + reach + 6:.1f}" y="{y + 13}">{row.ratio:.2f}</text>',
        ]
    one = f"{LEFT + scale:.1f}"
    parts += [f'<line class="one" x1="{one}" x2="{one}" y1="32" y2="{bottom}"/>', "</svg>", ""]
    return "\n".join(parts)


def draw(path: Path, *summaries: Mapping[str, Any]) -> None:
    path.write_text(svg([row for summary in summaries for row in rows_of(summary)]), "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.bench.chart", description=__doc__)
    parser.add_argument("svg", type=Path)
    parser.add_argument("figures", type=Path, nargs="+", help="figures that runs wrote with --json")
    options = parser.parse_args()
    draw(options.svg, *(json.loads(file.read_bytes())["summary"] for file in options.figures))
