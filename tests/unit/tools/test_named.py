"""The modules and tests that the tools name exist."""

from importlib.util import find_spec
from pathlib import Path

from tools.mutants import SUBJECTS
from tools.sanitized import SUITES


def test_each_module_and_each_test_of_the_mutants_exists() -> None:
    modules = {name for subject in SUBJECTS.values() for name in subject.modules}
    assert {name for name in modules if find_spec(name) is None} == set()
    paths = {path for subject in SUBJECTS.values() for path in subject.tests}
    assert {path for path in (*paths, *SUITES) if not Path(path).exists()} == set()
