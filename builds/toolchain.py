"""The tools that make a wheel: the machine's C++ compiler, and venvs with the pinned others."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from builds import store
from builds.errors import BuildError
from builds.pins import FOLDER, Pins

LOCK = FOLDER / "locks" / "tools.txt"
NODE_LOCK = FOLDER / "locks" / "node.txt"
_NOT_INHERITED = re.compile(r"^(NODE_(?!EXTRA_CA_CERTS$)|LLAMA_|VITE_)")
"""Of the environment's variables: they would change what npm builds."""
# Those of the pinned tools that influence what the compiler makes.
COMPILES = ("cmake", "ninja", "scikit-build-core")


def compiler() -> str:
    """The first line of the C++ compiler's version; raises BuildError if there is none."""
    return _asked("--version").splitlines()[0].strip()


def target() -> str:
    """What the C++ compiler compiles for, such as `aarch64-linux-gnu`."""
    return _asked("-dumpmachine").strip()


def accepts(flag: str) -> bool:
    """Whether the C++ compiler knows a flag."""
    line = [*_cxx(), flag, "-x", "c++", "-c", os.devnull, "-o", os.devnull]
    return subprocess.run(line, capture_output=True).returncode == 0


def _asked(flag: str) -> str:
    shown = subprocess.run([*_cxx(), flag], capture_output=True, text=True)
    if shown.returncode != 0:
        raise BuildError(f"{' '.join(_cxx())} {flag} failed: {shown.stderr.strip()}")
    return shown.stdout


def _cxx() -> list[str]:
    command = os.environ.get("CXX", "c++").split()
    if shutil.which(command[0]) is None:
        raise BuildError(
            f"No C++ compiler found (looked for {' '.join(command)}). Install one: "
            "'apt-get install g++' on Debian and Ubuntu, 'xcode-select --install' on macOS."
        )
    return command


def make_venv(path: Path) -> Path:
    """Create a venv with pip and return its Python."""
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
    """Run pip quietly; its own messages are shown if it fails."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        said = (result.stderr.strip() or result.stdout.strip())[-2000:]
        raise BuildError(f"pip {arguments[0]} failed:\n{said}")


def compile_bytecode(python: Path, folder: Path) -> None:
    """Keep the bytecode of all modules in the folder beside them, where it can be written to."""
    subprocess.run([python, "-m", "compileall", "-qq", folder])


def install(python: Path, lock: Path) -> None:
    """Install what the lock lists. A package with another hash stops this before any of its code
    runs."""
    pip(python, "install", "--require-hashes", "--no-deps", f"--requirement={lock}")


def python(pins: Pins) -> Path:
    """The Python of the venv with the pinned build tools; made at the first use."""
    locked = set(re.findall(r"^([\w-]+==[\w.]+)", LOCK.read_text(), re.MULTILINE))
    wanted = {f"{name}=={version}" for name, version in pins.toolchain.items()}
    if not wanted <= locked:
        missing = ", ".join(sorted(wanted - locked))
        raise BuildError(f"{LOCK} has no {missing}, which versions.toml pins: run 'make lock'.")
    return of_lock(LOCK, f"the build tools: {', '.join(sorted(wanted))}")


def node() -> Path:
    """The pinned Node's command, with npm beside it; installed at the first use."""
    return of_lock(NODE_LOCK, "Node").with_name("node")


def npm(node: Path, folder: Path, *arguments: str, **environment: str) -> None:
    """Run npm in a folder; raises `BuildError` with what it said if it fails."""
    inherited = {k: v for k, v in os.environ.items() if not _NOT_INHERITED.match(k)}
    path = f"{node.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    inherited |= {"PATH": path, "npm_config_update_notifier": "false", **environment}
    command = [str(node.with_name("npm")), *arguments]
    done = subprocess.run(command, cwd=folder, env=inherited, capture_output=True, text=True)
    if done.returncode != 0:
        said = f"{done.stdout}\n{done.stderr}".strip()[-3000:]
        raise BuildError(f"{said}\n\nnpm {arguments[0]} failed in {folder}.")


def of_lock(lock: Path, what: str) -> Path:
    """The Python of the venv in the cache that has what the lock lists; made at the first use."""
    tag = f"{lock.stem}-py{sys.version_info.major}{sys.version_info.minor}"
    home = store.folder("toolchain") / f"{tag}-{store.sha256(lock)[:16]}"
    ready = home / "bin" / "python"
    marker = home / "complete"
    with store.lock(f"toolchain-{tag}"):
        if not (marker.exists() and ready.exists()):
            # Not renamed into place, because a venv has its own path in it. The marker says that it
            # is complete.
            store.say(f"installing {what}")
            make_venv(home)
            install(ready, lock)
            marker.touch()
    return ready


def packed(pins: Pins, project: Path, out: Path, *, editable: bool = False) -> Path:
    """The wheel of a project with a `pyproject.toml`, made by the pinned build backend: pip alone
    would fetch one without a hash."""
    hook = "build_editable" if editable else "build_wheel"
    code = f"import hatchling.build; hatchling.build.{hook}({str(out)!r})"
    command = [str(python(pins)), "-c", code]
    out.mkdir(exist_ok=True)
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{project.name} could not be packed:\n{done.stderr[-2000:]}")
    (wheel,) = out.glob("*.whl")
    return wheel
