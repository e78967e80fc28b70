"""The names of log events are an interface: each is in docs/operations.md, and nothing else is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}


def names_in_the_code() -> dict[str, str]:
    """Event → where it is logged."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "worker").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and node.args and is_log_call(node.func):
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    found.setdefault(first.value, where)
    return found


def is_log_call(function: ast.expr) -> bool:
    """`log.info(…)`, or `write(…)` and `getattr(log, …)(…)` where the level is chosen first."""
    if isinstance(function, ast.Attribute):
        return function.attr in LEVELS
    if isinstance(function, ast.Call):
        return isinstance(function.func, ast.Name) and function.func.id == "getattr"
    return isinstance(function, ast.Name) and function.id == "write"


def names_on_the_page() -> set[str]:
    text = (ROOT / "docs/operations.md").read_text("utf-8")
    section = text.split("## Log events", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"`([a-z_]+\.[a-z_]+)`", section))


def test_every_event_has_a_room_and_a_step() -> None:
    odd = {
        name: where
        for name, where in names_in_the_code().items()
        if not re.fullmatch(r"[a-z_]+\.[a-z_]+", name)
    }
    assert odd == {}, "names are room.step, lower case"


def test_the_page_lists_them_all_and_no_others() -> None:
    assert names_on_the_page() == set(names_in_the_code())
