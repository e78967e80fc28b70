"""`.venv`: the built wheel, the worker in editable form, test tools; quick if nothing has
changed. The chat page is installed too if it is in the cache."""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from builds import cuda, locks, store, toolchain, ui, wheels
from builds import pins as pinned
from builds.pins import Pins, Recipe

ROOT = pinned.FOLDER.parent
STAMP = "llorch-setup.json"


def setup(
    venv: Path,
    backend: str,
    *,
    to_run: bool = False,
    native: bool = False,
    sanitized: bool = False,
    given_sdist: Path | None = None,
) -> Path:
    """Bring the venv up to date and return its Python.

    With `native`, its wheel is for this processor and GPU alone; with `sanitized`, it looks for
    faults of memory while it runs. With `to_run`, it is made for running the worker here as soon as
    possible: without test tools, and with a native wheel if the one for all processors is not built
    yet.
    """
    venv = venv.absolute()
    python = venv / "bin" / "python"
    pins, lock = pinned.pins(), locks.TEST
    recipe = _recipe(backend, native=native, sanitized=sanitized)
    place = hashlib.sha256(str(venv).encode()).hexdigest()[:16]
    with store.lock(f"venv-{place}"):
        have = _stamp(venv) if python.exists() else {}
        wanted = _wanted(recipe, pins, lock)
        if have == wanted:
            return python
        if to_run:
            here = _recipe(backend, native=backend in ("cpu", "cuda", "vulkan"))
            enough = [(each, kept) for each in (recipe, here) for kept in (locks.RUNTIME, lock)]
            if have in (_wanted(each, pins, kept) for each, kept in enough):
                return python
            lock = locks.RUNTIME
            recipe = recipe if wheels.is_built(recipe, pins) else here
            wanted = _wanted(recipe, pins, lock)
        if have.get("python") != wanted["python"]:
            store.say(f"creating {venv}")
            toolchain.make_venv(venv)
            have = {}
        (venv / STAMP).unlink(missing_ok=True)  # until all of it has succeeded
        built = wheels.build(recipe, pins, given_sdist=given_sdist)
        store.say("installing the worker" if to_run else "installing the worker and its test tools")
        toolchain.install(python, lock)
        if have.get("wheel") != wanted["wheel"]:
            store.say(f"installing {built.name}")
            _install_wheel(python, built)
            _place_test_plugins(built, venv / "test-plugins")
        if ui.is_built(pins):
            _install_wheel(python, ui.build(pins))
        _install_worker(python, pins, editable=True)
        # pip does so only for what it copies, and a start without it takes a quarter longer. Where
        # PYTHONDONTWRITEBYTECODE is set, each start would.
        toolchain.compile_bytecode(python, ROOT / "worker")
        toolchain.pip(python, "check")
        (venv / STAMP).write_text(json.dumps(wanted, indent=2) + "\n")
    return python


def install(venv: Path, built: Sequence[Path]) -> Path:
    """Make a new venv with the built wheels, the worker and its dependencies, as an image has
    it."""
    python = toolchain.make_venv(venv)
    toolchain.install(python, locks.RUNTIME)
    for wheel in built:
        _install_wheel(python, wheel.absolute())
    _install_worker(python, pinned.pins(), editable=False)
    toolchain.pip(python, "check")
    return python


def _wanted(recipe: Recipe, pins: Pins, lock: Path) -> dict[str, str]:
    return {
        "python": sys.version,
        "wheel": wheels.key(recipe, pins),
        "project": store.sha256(ROOT / "pyproject.toml"),
        "lock": f"{lock.name} {store.sha256(lock)}",
        "page": ui.key(pins) if ui.is_built(pins) else "",
        "root": str(ROOT),
    }


def _recipe(backend: str, *, native: bool, sanitized: bool = False) -> Recipe:
    """With `native`, for this machine's processor and GPU alone."""
    architectures = (cuda.architecture_here(),) if native and backend == "cuda" else ()
    return pinned.recipe(backend, native=native, sanitized=sanitized, architectures=architectures)


def _install_worker(python: Path, pins: Pins, *, editable: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="llorch-pack-") as out:
        _install_wheel(python, toolchain.packed(pins, ROOT, Path(out), editable=editable))


def _install_wheel(python: Path, wheel: Path) -> None:
    toolchain.pip(python, "install", "--force-reinstall", "--no-deps", str(wheel))


def _place_test_plugins(built: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for plugin in built.parent.glob("test-plugins/*"):
        shutil.copy2(plugin, target / plugin.name)


def _stamp(venv: Path) -> dict[str, str]:
    """What the last complete setup of this venv was made for; empty if there was none."""
    try:
        text = (venv / STAMP).read_text()
        return {str(name): str(value) for name, value in json.loads(text).items()}
    except (FileNotFoundError, ValueError):
        return {}
