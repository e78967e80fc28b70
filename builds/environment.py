"""`.venv`: our wheel, the worker in editable form, test tools; quick when nothing changed."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from builds import pins as pinned
from builds import store, toolchain, wheels

ROOT = pinned.FOLDER.parent
STAMP = "llorch-setup.json"
# The versions that were tested together; `make lock` renews them.
CONSTRAINTS = pinned.FOLDER / "constraints.txt"


def setup(venv: Path, backend: str, *, given_sdist: Path | None = None) -> Path:
    """Brings the venv up to date and returns its Python."""
    venv = venv.absolute()
    python = venv / "bin" / "python"
    pins, recipe = pinned.pins(), pinned.recipe(backend)
    wanted = {
        "python": sys.version,
        "wheel": wheels.key(recipe, pins),
        "project": store.sha256(ROOT / "pyproject.toml"),
        "constraints": store.sha256(CONSTRAINTS),
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
        toolchain.pip(
            python, "install", f"--constraint={CONSTRAINTS}", "--editable", f"{ROOT}[test]"
        )
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


def lock(python: Path) -> None:
    """Writes what this Python has installed as the versions that are known to work together."""
    command = [str(python), "-m", "pip", "list", "--format=freeze", "--exclude-editable"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Our wheel comes from versions.toml; pip and setuptools are the venv's own.
    own = re.compile(r"^(llama[-_]cpp[-_]python|pip|setuptools|torch)==")
    lines = [line for line in shown.splitlines() if not own.match(line)]
    CONSTRAINTS.write_text(
        "# The versions that were tested together, for `make setup` and the images. Written by\n"
        "# `make lock`.\n" + "".join(f"{line}\n" for line in sorted(lines, key=str.lower))
    )
