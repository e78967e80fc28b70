"""One `/metrics` for the whole fleet: each worker's series with a label that says whose they are.

Reads and writes Prometheus's text format 0.0.4. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping


def merged(texts: Mapping[tuple[str, str], str]) -> str:
    """The expositions of all workers as one; keys are (worker, model), which become labels.

    A family's HELP and TYPE lines come once, before the samples of all workers.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for (worker, model), text in texts.items():
        labels = f'worker="{_escaped(worker)}",model="{_escaped(model)}"'
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                kind, _, rest = line[2:].partition(" ")
                if kind not in ("HELP", "TYPE"):
                    continue
                family = rest.partition(" ")[0]
                known = heads.setdefault(family, [])
                if not any(each.startswith(f"# {kind} ") for each in known):
                    known.append(line)
            elif line.strip():
                samples.setdefault(family, []).append(_labelled(line, labels))
    lines = []
    for family in dict.fromkeys((*heads, *samples)):
        lines += heads.get(family, [])
        lines += samples.get(family, [])
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, labels: str) -> str:
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        rest = sample[brace + 1 :]
        comma = "" if rest.startswith("}") else ","
        return f"{sample[:brace]}{{{labels}{comma}{rest}"
    return f"{sample[:space]}{{{labels}}}{sample[space:]}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
