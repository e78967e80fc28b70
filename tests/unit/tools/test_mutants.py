"""The mutants' tests may compute: each mutant is tried in a fork, which lacks OpenMP's threads."""

from __future__ import annotations

import subprocess
import sys

from tests import ROOT

TEST = "tests/unit/devices/test_memory.py::test_the_plan_equals_the_allocation"
RUN = f"""
import sys
from tools import mutants
mutants.MOST_SECONDS = 20
mutants.SUBJECTS["plan"] = mutants.Subject(
    ("worker.devices.plan.unloaded",), ("{TEST}[cpu-grouped-q8-one slot]",)
)
sys.argv = ["mutants", "--of", "plan", "--sample", "1"]
mutants.main()
"""


def test_a_test_that_computes_also_runs_in_a_fork() -> None:
    ran = subprocess.run([sys.executable, "-c", RUN], cwd=ROOT, capture_output=True, text=True)
    assert "1 tests" in ran.stdout and "left out" not in ran.stdout, ran.stdout + ran.stderr
