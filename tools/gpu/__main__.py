"""`python -m tools.gpu`: runs every step within its time and writes one report, whatever fails.

python -m tools.gpu pack FILE --arch 90-real   # here: what a bare machine needs
python -m tools.gpu --backend cuda             # there
python -m tools.gpu --backend cpu              # the rehearsal, on any machine

If a call may take only ten minutes, --within 580 runs what fits, and the next call the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.gpu import pack, steps
from tools.gpu.machine import Bench, Limit
from worker.wire.backends import BACKENDS

LONGEST_S = 540.0
"""Maximum time of a step, whatever the patience: it must fit into a call of ten minutes."""
LEAST_SHARE = 0.1
"""A step starts only if the call has this fraction of the step's limit left."""
EXPECTED = Path(__file__).with_name("expected.json")

STEPS: list[tuple[str, float, Callable[[Bench], Any]]] = [
    ("the installed wheel", 10, steps.installed_wheel),
    ("build llama-server", 480, steps.build_llama_server),
    ("doctor", 60, steps.doctor),
    ("what the driver compiles", LONGEST_S, steps.first_tokens),
    ("plan against what the driver says", 180, steps.plan_and_memory),
    ("a start that must not fit", 60, steps.must_not_fit),
    ("the engine inside its walls", 120, steps.confined),
    ("greedy text as on the CPU", 120, steps.greedy_text),
    ("sixteen streams as alone", 120, steps.streams_as_alone),
    ("deterministic requests bit for bit", 60, steps.deterministic),
    ("a draft model beside the model", 60, steps.draft_model),
    ("the engine killed and stopped", 120, steps.engine_comes_back),
    ("speed beside llama-server", LONGEST_S, steps.speed),
    ("speed of a small model, and cancels", LONGEST_S, steps.small_model),
    ("speed with guesses and without", 240, steps.speculation),
    ("profile of a step", 120, steps.step_profile),
    ("sampling on the host and on the device", 120, steps.device_sampling),
    ("speed with other settings", 300, steps.other_settings),
]


def main(argv: list[str]) -> int:
    if argv[:1] == ["pack"]:
        return pack.main(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    parser.add_argument("--backend", choices=[*BACKENDS], default="cuda")
    parser.add_argument(
        "--only",
        default="",
        help="steps whose name contains this, including those that failed before",
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-report"))
    parser.add_argument("--short", action="store_true", help="small models and loads: a rehearsal")
    parser.add_argument(
        "--within",
        type=float,
        default=math.inf,
        help="seconds; a step that does not finish in them is left for the next call",
    )
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor for the steps' own limits"
    )
    options = parser.parse_args(argv)
    # After `nohup … &` SIGINT is ignored, also by the children that a step ends with it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options.out.mkdir(parents=True, exist_ok=True)
    expected = json.loads(EXPECTED.read_text("utf-8"))
    out = options.out.resolve()
    bench = Bench(options.backend, out, expected, options.short, options.patience)
    end = time.monotonic() + options.within
    wanted = [step for step in STEPS if options.only in step[0]]
    rows = recorded(bench).items()
    done = {name for name, row in rows if row["outcome"] == "ok" or not options.only}
    left = [step for step in wanted if step[0] not in done]
    for name, limit_s, step in left:
        limit_s = min(limit_s * bench.patience, LONGEST_S)
        if not run(bench, name, limit_s, step, end):
            break
    found = recorded(bench)
    text = report(bench, list(found.values()))
    (options.out / "report.md").write_text(text, "utf-8")
    print(text)
    if missing := [name for name, *_ in wanted if name not in found]:
        print(f"Left for the next call: {', '.join(missing)}.")
        return 3
    return int(any(row["outcome"] != "ok" for row in found.values()))


def recorded(bench: Bench) -> dict[str, dict[str, Any]]:
    """Return the rows of the steps that this call and earlier ones have recorded in the folder."""
    try:
        lines = (bench.out / "steps.jsonl").read_text("utf-8").splitlines()
    except FileNotFoundError:
        return {}
    return {row["step"]: row for row in map(json.loads, lines)}


def run(
    bench: Bench, name: str, limit_s: float, step: Callable[[Bench], Any], end: float = math.inf
) -> bool:
    """Run one step and record its outcome, seconds and findings. A failure ends only the step.

    Returns false, and records nothing, if too little time was left before `end`.
    """
    began = time.monotonic()
    left_s = end - began
    if left_s < limit_s * LEAST_SHARE:
        return False
    print(f"gpu-report: {name} (at most {limit_s:.0f} s)", file=sys.stderr, flush=True)
    row: dict[str, Any] = {"step": name, "outcome": "ok"}
    try:
        with Limit(min(limit_s, left_s)):
            row["found"] = step(bench)
    except Exception as error:
        if time.monotonic() >= end and left_s < limit_s:
            return False
        row |= {"outcome": "failed", "found": f"{type(error).__name__}: {error}"[:2000]}
        log = bench.out / "failures.log"
        with log.open("a", encoding="utf-8") as handle:
            handle.write(f"--- {name}\n{traceback.format_exc()}\n")
    row["seconds"] = round(time.monotonic() - began, 1)
    with (bench.out / "steps.jsonl").open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(row) + "\n")  # at once: the machine may be taken back
    return True


def report(bench: Bench, rows: list[dict[str, Any]]) -> str:
    lines = [
        f"# {bench.backend}: {bench.device}",
        "",
        "| step | outcome | s | found |",
        "| --- | --- | ---: | --- |",
    ]
    for row in rows:
        found = row["found"] if isinstance(row["found"], str) else json.dumps(row["found"])
        found = found.replace("|", "/").replace("\n", " ")
        lines.append(f"| {row['step']} | {row['outcome']} | {row['seconds']} | {found} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
