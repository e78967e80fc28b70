"""One `/metrics` for the whole fleet: labels say which worker and model each series belongs to.

Reads and writes Prometheus's text format 0.0.4. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping


def merged(texts: Mapping[tuple[str, str], str]) -> str:
    """Merge the expositions of all workers; the keys are (worker, model) and become labels.

    The HELP and TYPE lines of a family come once, before its samples from all workers.
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
