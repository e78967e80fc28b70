"""Mutation testing: changes one place at a time, of the scheduler and the cache unless another
subject is named, and counts the changes that the tests catch.

    python -m tools.mutants                    all places, about ten minutes
    python -m tools.mutants --sample 100       a random hundred of them, by --seed
    python -m tools.mutants --only Cache.match the places of some functions
    python -m tools.mutants --of stops parsers those of the stops and of the answers' parsers

A *mutant* is a function with one change: a comparison, an operator, a condition, a constant or a
returned value is replaced, or a statement is removed. Only functions are changed, without their
asserts and without module-level code. The tests are those of the subject that need no engine. All
run once, to record which functions each calls; then each mutant is installed in a process of its
own, and the tests that call its function run, the quickest first, until one fails. A mutant also
counts as caught if a test takes much longer.

Written here because the libraries for this let pytest collect the tests again for each mutant,
which takes several times as long. Exit status: 0 if at least `--least` percent were caught.
"""

from __future__ import annotations

import argparse
import ast
import copy
import faulthandler
import importlib
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, cast

import pytest
from _pytest.runner import runtestprotocol

_ENGINE, _UNIT = "worker.engine", "tests/unit"


@dataclass(frozen=True, slots=True)
class Subject:
    """Modules to change, and the tests that should catch the changes."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


SUBJECTS = {
    "scheduler": Subject(
        (
            f"{_ENGINE}.scheduler",
            *(f"{_ENGINE}.cache.{name}" for name in ("cache", "slots", "memory", "moves")),
        ),
        (
            *(f"{_UNIT}/engine/test_{name}.py" for name in ("cache", "scheduler", "loop", "pace")),
            *(f"{_UNIT}/engine/test_{name}.py" for name in ("memory_tier", "snapshots")),
            *(f"{_UNIT}/engine/test_{name}.py" for name in ("divisions", "placement")),
            f"{_UNIT}/engine/test_scheduler_alone.py",
            f"{_UNIT}/engine/test_kv_store.py",
        ),
    ),
    "plan": Subject(
        tuple(
            f"worker.devices.plan.{name}"
            for name in ("cells", "memory", "placement", "plan", "projector", "unloaded")
        ),
        tuple(
            f"{_UNIT}/devices/test_{name}.py"
            for name in ("plan_alone", "placement", "memory", "sets")
        ),
    ),
    "guesses": Subject(
        tuple(
            f"{_ENGINE}.{name}"
            for name in ("pace", "speculation.lookup", "speculation.speculation")
        ),
        tuple(f"{_UNIT}/engine/test_{name}.py" for name in ("lookup", "pace", "speculation")),
    ),
    "stops": Subject((f"{_ENGINE}.text.stops",), (f"{_UNIT}/engine/test_text.py",)),
    "parsers": Subject(
        tuple(f"worker.api.chat.parse.{name}" for name in ("parser", "calls", "tagged_calls")),
        tuple(f"{_UNIT}/api/test_{name}.py" for name in ("answers", "round_trips")),
    ),
    "wire": Subject(
        ("worker.wire.transport", "worker.wire.codec"),
        (f"{_UNIT}/wire/test_wire.py",),
    ),
    "connection": Subject(("worker.api.http.connection",), (f"{_UNIT}/api/test_connection.py",)),
}
NEEDS_AN_ENGINE = ("RealEngine", "vocabulary", "llama_cpp")
"""Names in a test, or of its fixtures, that mean that it needs an engine."""
PATIENCE, LEAST_SECONDS = 5, 0.5
"""A test of a mutant may take this many times its processor time, plus this many seconds."""
MOST_SECONDS = 60
"""The time limit of one test, which may wait forever."""

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.Continue: ast.Break, ast.Break: ast.Continue,
}  # fmt: skip
_SWAPPED_NAMES = {"min": "max", "max": "min", "all": "any", "any": "all"}


@dataclass
class Mutant:
    module: str
    function: str
    line: int
    what: str
    code: CodeType


# --- what is changed -----------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield the possible changes of a node: a description, and a function that changes a copy of
    it."""

    def swap(name: str) -> Callable[[Any], Any]:
        def swapped(node: Any) -> Any:
            setattr(node, name, _SWAPPED[type(getattr(node, name))]())
            return node

        return swapped

    def swap_first(node: Any) -> Any:
        node.ops[0] = _SWAPPED[type(node.ops[0])]()
        return node

    def negate(node: Any) -> Any:
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return node

    match node:
        case ast.Compare():
            yield "another comparison", swap_first
        case ast.BoolOp() | ast.BinOp() | ast.AugAssign() if type(node.op) in _SWAPPED:
            yield "another operator", swap("op")
        case ast.UnaryOp(op=ast.Not()):
            yield "no `not`", lambda node: node.operand
        case ast.Constant(value=bool()):
            yield "the opposite", lambda node: ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "one more", lambda node: ast.Constant(node.value + 1)
        case ast.Name(id="min" | "max" | "all" | "any"):
            yield "the opposite", lambda node: ast.Name(_SWAPPED_NAMES[node.id], node.ctx)
        case ast.Continue() | ast.Break():
            yield "another jump", lambda node: _SWAPPED[type(node)]()
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            yield "no value", lambda node: ast.Return(ast.Constant(None))
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            yield "the opposite condition", negate
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            yield "no statement", lambda node: ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "no statement", lambda node: ast.Pass()


class _Change(ast.NodeTransformer):
    def __init__(self, target: ast.AST, make: Callable[[Any], Any]) -> None:
        self._target, self._make = target, make

    def visit(self, node: ast.AST) -> Any:
        if node is self._target:
            return ast.copy_location(self._make(copy.deepcopy(node)), node)
        return super().visit(node)


def _places(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may be changed: no annotations, asserts or nested definitions."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Assert | ast.arguments):
                continue
            yield child
            yield from _places(child)


def mutants_of(module: str) -> Iterator[Mutant]:
    source = Path(importlib.import_module(module).__file__ or "").read_text()
    tree = ast.parse(source)
    owners: list[tuple[str, ast.FunctionDef]] = []
    for top in tree.body:
        if isinstance(top, ast.FunctionDef):
            owners.append((top.name, top))
        elif isinstance(top, ast.ClassDef):
            owners += [
                (f"{top.name}.{each.name}", each)
                for each in top.body
                if isinstance(each, ast.FunctionDef)
            ]
    for name, function in owners:
        for place in _places(function):
            for what, make in changes(place):
                code = _code_of(_compiled(name, function, place, make), name)
                yield Mutant(module, name, place.lineno, what, code)  # type: ignore[attr-defined]


def _compiled(
    name: str, function: ast.FunctionDef, place: ast.AST, make: Callable[[Any], Any]
) -> CodeType:
    """Compile the function with one change, alone in its class."""
    memo: dict[int, Any] = {}
    twin = copy.deepcopy(function, memo)
    body: list[ast.stmt] = [_Change(memo[id(place)], make).visit(twin)]
    if "." in name:
        body = [
            ast.ClassDef(name.split(".")[0], bases=[], keywords=[], body=body, decorator_list=[])
        ]
    tree = ast.fix_missing_locations(ast.Module(body, type_ignores=[]))
    return compile(tree, f"<mutant of {name}>", "exec")


def _code_of(code: CodeType, qualname: str) -> CodeType:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            if const.co_qualname == qualname:
                return const
            if qualname.startswith(const.co_qualname + "."):
                return _code_of(const, qualname)
    raise LookupError(qualname)


def function_of(module: str, qualname: str) -> FunctionType:
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = vars(found)[name]
    for decorated in ("fget", "func", "__func__", "__wrapped__"):
        found = getattr(found, decorated, found)
    assert isinstance(found, FunctionType), qualname
    return found


# --- who notices ---------------------------------------------------------------------------------


@dataclass
class Mutation:
    """A pytest plugin that runs the collected tests on each mutant instead of once."""

    options: argparse.Namespace
    tests_of: dict[CodeType, list[tuple[float, pytest.Item]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    share: float = 0.0

    def pytest_configure(self) -> None:
        from hypothesis import HealthCheck, Phase, settings  # pytest must import it first

        settings.register_profile(
            "mutants",
            database=None,
            derandomize=True,
            deadline=None,
            max_examples=40,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],  # the first failure is enough
        )
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [each for each in items if not _needs_an_engine(each)]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        modules = [each for name in self.options.of for each in SUBJECTS[name].modules]
        mutants = [each for module in modules for each in mutants_of(module)]
        if self.options.only:
            mutants = [m for m in mutants if m.function.startswith(tuple(self.options.only))]
        if self.options.sample:
            dice = random.Random(self.options.seed)
            mutants = dice.sample(mutants, min(self.options.sample, len(mutants)))
        functions = {function_of(m.module, m.function).__code__ for m in mutants}
        began = time.monotonic()
        for item in session.items:
            self._watch(item, functions)
        for tests in self.tests_of.values():
            tests.sort(key=lambda pair: pair[0])
        print(f"{len(session.items)} tests, {time.monotonic() - began:.1f} s", flush=True)
        n_noticed = 0
        for number, mutant in enumerate(mutants, 1):
            if self._is_noticed(mutant):
                n_noticed += 1
            else:
                print(f"{mutant.module}:{mutant.line} {mutant.function}: {mutant.what}", flush=True)
            if number % 50 == 0:
                print(f"  {n_noticed} of {number} caught", flush=True)
        self.share = 100 * n_noticed / max(len(mutants), 1)
        seconds = time.monotonic() - began
        print(f"{n_noticed} of {len(mutants)} caught: {self.share:.1f} %, {seconds:.0f} s")
        return True

    def _watch(self, item: pytest.Item, functions: set[CodeType]) -> None:
        """Run a test on the unchanged code, and record which functions it calls."""
        called: set[CodeType] = set()

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code in functions:
                called.add(frame.f_code)

        sys.setprofile(note)
        began = time.process_time()
        passes = _passes(item)
        seconds = time.process_time() - began
        sys.setprofile(None)
        if not passes or (called and self._fails([(seconds, item)])):
            print(f"left out: {item.nodeid} fails on the unchanged code", flush=True)
            return
        for code in called:
            self.tests_of[code].append((seconds, item))

    def _is_noticed(self, mutant: Mutant) -> bool:
        function = function_of(mutant.module, mutant.function)
        return self._fails(self.tests_of[function.__code__], function, mutant.code)

    def _fails(
        self,
        tests: list[tuple[float, pytest.Item]],
        function: FunctionType | None = None,
        code: CodeType | None = None,
    ) -> bool:
        """Run tests in a process of its own, optionally with a mutant; returns whether one
        fails."""
        if not (pid := os.fork()):
            faulthandler.disable()
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            try:
                if function is not None and code is not None:
                    function.__code__ = code
                for seconds, item in tests:
                    signal.setitimer(signal.ITIMER_PROF, PATIENCE * seconds + LEAST_SECONDS)
                    signal.alarm(MOST_SECONDS)
                    if not _passes(item):
                        os._exit(1)
            except BaseException:
                os._exit(1)
            os._exit(0)
        return os.waitpid(pid, 0)[1] != 0


def _passes(item: pytest.Item) -> bool:
    # Keep what the session has made: other processes use it, too.
    reports = runtestprotocol(item, log=False, nextitem=cast(Any, item.session))
    return not any(report.failed for report in reports)


def _needs_an_engine(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    names = [item.name, *item.fixturenames, *item.function.__code__.co_names]
    is_long = item.get_closest_marker("long") is not None
    return is_long or any(word in name for name in names for word in NEEDS_AN_ENGINE)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--of", nargs="+", choices=[*SUBJECTS], default=["scheduler"], help="subjects to change"
    )
    parser.add_argument("--only", nargs="+", help="only functions whose names begin with this")
    parser.add_argument("--sample", type=int, help="only this many mutants, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice")
    parser.add_argument("--least", type=float, default=85.0, help="percentage that must be caught")
    options = parser.parse_args()
    # A fork has none of OpenMP's threads, and would wait for them forever.
    os.environ["OMP_THREAD_LIMIT"] = "1"
    mutation = Mutation(options)
    tests = [each for name in options.of for each in SUBJECTS[name].tests]
    status = pytest.main(
        ["-q", "-o", "timeout=0", "-p", "no:cacheprovider", *tests],
        plugins=[mutation],
    )
    return 0 if status == 0 and mutation.share >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
