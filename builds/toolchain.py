"""What compiles a wheel: the machine's C++ compiler, and a venv with the other tools as pinned."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from builds import store
from builds.errors import BuildError
from builds.pins import Pins


def compiler() -> str:
    """The first line of the C++ compiler's own version; a sentence when there is none."""
    command = os.environ.get("CXX", "c++")
    if shutil.which(command.split()[0]) is None:
        raise BuildError(
            f"No C++ compiler found (looked for {command}). Install one: "
            "'apt-get install g++' on Debian and Ubuntu, 'xcode-select --install' on macOS."
        )
    shown = subprocess.run([*command.split(), "--version"], capture_output=True, text=True)
    if shown.returncode != 0:
        raise BuildError(f"{command} --version failed: {shown.stderr.strip()}")
    return shown.stdout.splitlines()[0].strip()


def make_venv(path: Path) -> Path:
    """Creates a venv with pip and returns its Python."""
    try:
        import ensurepip  # noqa: F401 - Debian ships it apart, in python3-venv
    except ImportError as error:
        raise BuildError(
            f"{sys.executable} cannot create virtual environments: its ensurepip module is "
            "missing. Install it: 'apt-get install python3-venv' on Debian and Ubuntu."
        ) from error
    venv.EnvBuilder(with_pip=True, clear=True, symlinks=os.name != "nt").create(path)
    return path / "bin" / "python"


def pip(python: Path, *arguments: str) -> None:
    """Runs pip quietly; its own words are shown when it fails."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        said = (result.stderr.strip() or result.stdout.strip())[-2000:]
        raise BuildError(f"pip {arguments[0]} failed:\n{said}")


def python(pins: Pins) -> Path:
    """The Python of the venv that holds the pinned build tools; made on first use."""
    wanted = [f"{name}=={version}" for name, version in sorted(pins.toolchain.items())]
    tag = f"py{sys.version_info.major}{sys.version_info.minor}"
    name = "-".join([tag, *(requirement.replace("==", "-") for requirement in wanted)])
    home = store.folder("toolchain") / name
    ready = home / "bin" / "python"
    marker = home / "complete"
    with store.lock(f"toolchain-{tag}"):
        if not (marker.exists() and ready.exists()):
            # Not renamed into place: a venv knows its own path. The marker says that it is whole.
            store.say(f"installing the build tools: {', '.join(wanted)}")
            make_venv(home)
            pip(ready, "install", *wanted)
            marker.touch()
    return ready
