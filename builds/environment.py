"""`.venv`: our wheel, the worker in editable form, test tools; quick when nothing changed."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from builds import pins as pinned
from builds import store, toolchain, wheels

ROOT = pinned.FOLDER.parent
STAMP = "llorch-setup.json"


def setup(venv: Path, backend: str, *, given_sdist: Path | None = None) -> Path:
    """Brings the venv up to date and returns its Python."""
    venv = venv.absolute()
    python = venv / "bin" / "python"
    pins, recipe = pinned.pins(), pinned.recipe(backend)
    wanted = {
        "python": sys.version,
        "wheel": wheels.key(recipe, pins),
        "project": hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(),
        "root": str(ROOT),
    }
    place = hashlib.sha256(str(venv).encode()).hexdigest()[:16]
    with store.lock(f"venv-{place}"):
        have = _stamp(venv)
        if have == wanted and python.exists():
            return python
        if have.get("python") != wanted["python"] or not python.exists():
            store.say(f"creating {venv}")
            toolchain.make_venv(venv)
            have = {}
        (venv / STAMP).unlink(missing_ok=True)  # until all of it has succeeded
        built = wheels.build(recipe, pins, given_sdist=given_sdist)
        if have.get("wheel") != wanted["wheel"]:
            store.say(f"installing {built.path.name}")
            toolchain.pip(python, "install", "--force-reinstall", "--no-deps", str(built.path))
            _place_test_plugins(built, venv / "test-plugins")
        store.say("installing the worker and its test tools")
        toolchain.pip(python, "install", "--editable", f"{ROOT}[test]")
        toolchain.pip(python, "check")
        (venv / STAMP).write_text(json.dumps(wanted, indent=2) + "\n")
    return python


def _place_test_plugins(built: wheels.BuiltWheel, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for plugin in built.test_plugins:
        shutil.copy2(plugin, target / plugin.name)


def _stamp(venv: Path) -> dict[str, str]:
    """What the last complete setup of this venv was made for; empty when there was none."""
    try:
        text = (venv / STAMP).read_text()
        return {str(name): str(value) for name, value in json.loads(text).items()}
    except (FileNotFoundError, ValueError):
        return {}


def installed_version(python: Path) -> str:
    """The version of the llama-cpp-python that this Python would import."""
    asked = "import importlib.metadata as m; print(m.version('llama-cpp-python'))"
    shown = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    return shown.stdout.strip()
