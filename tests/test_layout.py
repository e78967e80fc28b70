"""Rules that the source itself can show: who imports whom, and what no file may contain."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import ROOT

WORKER = ROOT / "worker"
LEAVES = {
    "errors",
    "installation",
    "wire",
    "settings",
    "setting_faults",
    "setting_files",
    "observability",
}
LEAVES |= {"lean_imports", "background", "child_processes", "expectations", "arguments", "sockets"}

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "wire": {"errors"},
    "installation": {"errors"},
    "lean_imports": set(),
    "background": set(),
    "child_processes": set(),
    "expectations": set(),
    "arguments": {"errors", "expectations"},
    "cli": {"errors"},
    "sockets": {"errors"},
    "confinement": {"wire"},
    "setting_faults": {"errors", "expectations"},
    "setting_files": {"errors"},
    "settings": {
        "errors",
        "wire",
        "installation",
        "setting_faults",
        "setting_files",
        "expectations",
    },
    "observability": {"errors", "wire", "settings", "lean_imports"},
    "assets": set(),
    "llama": LEAVES,
    "models": LEAVES,
    "convert": LEAVES | {"models", "llama"},
    "devices": LEAVES | {"llama", "models", "confinement"},
    "engine": LEAVES | {"llama", "devices", "models", "confinement"},
    "supervisor": LEAVES,
    "pool": LEAVES,
    "api": LEAVES | {"supervisor"},
    "fleet": LEAVES | {"api", "main", "models"},
    "lifecycle": LEAVES | {"cli", "api", "supervisor", "models", "pool", "confinement"},
    "commands": LEAVES | {"cli", "convert", "devices", "engine", "models"},
    "flags": LEAVES | {"commands"},
    "main": LEAVES | {"cli", "flags", "lifecycle", "supervisor", "commands", "devices"},
}
"""Room → the rooms that it may import, besides itself."""

ONLY_LLAMA = "llama_cpp"
ONLY_BY: dict[str, set[str]] = {
    ONLY_LLAMA: {"llama"},
    **dict.fromkeys(
        ("worker.wire.transport", "worker.wire.async_channel"), {"wire", "supervisor", "engine"}
    ),
    **dict.fromkeys(("pickle", "marshal", "shelve", "dill", "cloudpickle"), set[str]()),
}
"""Module → the rooms that may import it: the pipe's two ends; and nobody may import unpickling
modules, because the author of a pickle controls the process that reads it."""
IN_RAYS_PROCESSES = {"worker/fleet/replica.py"}
"""The files that import Ray, which only a fleet needs; Ray imports them by name."""
LAZY = {"huggingface_hub", "gguf", "tokenizers", "numpy", "httpx"}
"""Modules that take too long to import before the port is open."""


def sources(folder: Path = WORKER) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    return path.relative_to(WORKER).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> list[tuple[str, int]]:
    return list(_imports(parsed(path)))


def _imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            yield module, node.lineno
            if module.startswith("worker"):
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def test_imports_go_one_way() -> None:
    back_edges = []
    for path in sources():
        room = room_of(path)
        if room == "__init__":
            continue
        assert room in ALLOWED, f"{room} is a new room: say in this test what it may import"
        for module, line in imports(path):
            parts = module.split(".")
            if parts[0] == "worker" and len(parts) > 1 and parts[1] not in ALLOWED[room] | {room}:
                back_edges.append(f"{name_of(path)}:{line} imports {module}")
    assert back_edges == []


IN_THE_API = {
    "http": {"http"},
    "chat": {"chat", "http"},
    "pooling": {"pooling", "chat", "http"},
    "dialects": {"pooling", "chat", "http"},
}
"""Room of `worker/api` → the rooms in it that it may import; a dialect may also import its own
folder."""


def test_the_rooms_of_the_api_look_one_way() -> None:
    strangers = []
    for room, known in IN_THE_API.items():
        for path in sources(WORKER / "api" / room):
            own = path.relative_to(WORKER / "api").parts[:2]
            for module, line in imports(path):
                parts = module.split(".")[2:]
                if not module.startswith("worker.api.") or parts[0] in known:
                    continue
                if room != "dialects" or tuple(parts[:2]) != own:
                    strangers.append(f"{name_of(path)}:{line} imports {module}")
    assert strangers == []


def test_some_modules_are_imported_by_some_rooms_only() -> None:
    strangers = [
        f"{name_of(path)}:{line} imports {module}"
        for path in sources()
        for module, line in imports(path)
        for name in {module, module.partition(".")[0]} & ONLY_BY.keys()
        if room_of(path) not in ONLY_BY[name]
    ]
    assert strangers == []


def test_only_what_runs_in_rays_processes_imports_ray() -> None:
    """Ray is optional: a worker, and `llorch-ray` itself, start without it."""
    strangers, asked_for = [], []
    for path in sources():
        for module, line in imports(path):
            if module.split(".")[0] == "ray" and name_of(path) not in IN_RAYS_PROCESSES:
                strangers.append(f"{name_of(path)}:{line}")
            if module == "worker.fleet.replica":
                asked_for.append(name_of(path))
    assert strangers == []
    assert set(asked_for) <= IN_RAYS_PROCESSES


def loaded_by(*modules: str) -> set[str]:
    """Return the packages that importing the modules loads, in a fresh interpreter."""
    script = f"import sys, {', '.join(modules)}; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_the_port_does_not_wait_for_heavy_imports() -> None:
    assert loaded_by("worker.flags", "worker.lifecycle") & (LAZY | {ONLY_LLAMA}) == set()


def test_the_engine_process_is_started_before_anything_is_imported() -> None:
    assert loaded_by("worker.main") & {"pydantic", "structlog", "asyncio", "starlette"} == set()


def test_every_module_says_what_it_owns() -> None:
    silent = [
        name_of(path)
        for path in sources()
        if path.name != "__init__.py" and not ast.get_docstring(parsed(path))
    ]
    assert silent == []


BROAD = re.compile(r"\bexcept\s*(:|\(?\s*(Base)?Exception\b)")
"""A text that a file must contain for `_swallows` to find anything; most have none and are not
parsed."""


def test_nothing_is_left_for_later_or_swallowed() -> None:
    found = []
    later = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    for folder in ("worker", "builds", "tests"):
        for path in sources(ROOT / folder):
            text = path.read_text("utf-8")
            found += [f"{name_of(path)}: {word}" for word in later if word in text]
            for node in ast.walk(parsed(path)) if BROAD.search(text) else ():
                if isinstance(node, ast.ExceptHandler) and _swallows(node):
                    found.append(f"{name_of(path)}:{node.lineno}: swallows everything")
    assert found == []


def _swallows(handler: ast.ExceptHandler) -> bool:
    broad = handler.type is None or (
        isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    )
    return broad and all(isinstance(node, ast.Pass) for node in handler.body)


WHOLE_HEADS = {"worker/api/http/connection.py", "worker/fleet/gateway.py"}
"""The files that see all headers: one reads the framing of a body, one forwards them."""


def test_headers_of_requests_are_read_through_their_entries() -> None:
    """Each header that is read has an entry in `headers.py`, which also describes it."""
    found = []
    for path in [*sources(WORKER / "api"), *sources(WORKER / "fleet")]:
        if path.name == "headers.py" or name_of(path) in WHOLE_HEADS:
            continue
        text = ast.unparse(parsed(path))
        reads = re.search(
            r"scope\['headers'\]|request\.headers|\bhead(\[|\.(get|keys|items)\b)", text
        )
        found += [name_of(path)] * (reads is not None)
    assert found == []
