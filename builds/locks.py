"""The locks: every package that is installed, by version and hash. Nothing is installed without.

`runtime.txt` is what a worker needs, `test.txt` that and what the tests need, `page.txt` that and
what drives a browser, `fleet.txt` what a worker needs and Ray. `tools.txt` builds them, `cuda.txt`
completes a CUDA toolkit, `parity.txt` is what the converter is compared with, `resolver.txt` writes
the locks. They hold for every system and Python that the worker runs on, and name no index: that is
the machine's.
"""

import subprocess
from pathlib import Path

from builds import pins as pinned
from builds import store, toolchain
from builds.errors import BuildError

FOLDER = pinned.FOLDER / "locks"
RUNTIME, TEST, PAGE, FLEET, CUDA, PARITY, RESOLVER = (
    FOLDER / f"{name}.txt"
    for name in ("runtime", "test", "page", "fleet", "cuda", "parity", "resolver")
)
HEAD = "# Written by `make lock`.\n"
PROJECT = str(pinned.FOLDER.parent / "pyproject.toml")


def write(upgrade: bool) -> None:
    """Writes all of them anew; without `upgrade`, packages that are locked keep their versions."""
    uv = _resolver()
    newest = ["--upgrade"] if upgrade else []
    # Our own wheel is installed by itself: it is built, not fetched.
    project = [PROJECT, "--no-emit-package=llama-cpp-python", *newest]
    _compile(uv, TEST, [*project, "--extra=test"])
    _compile(uv, PAGE, [*project, "--extra=test", "--extra=page", f"--constraint={TEST}"])
    _compile(uv, RUNTIME, [*project, f"--constraint={TEST}"])
    _compile(uv, FLEET, [*project, "--extra=ray", f"--constraint={TEST}"])
    _compile(uv, CUDA, ["-"], f"nvidia-cublas=={pinned.versions()['cuda']['nvidia-cublas']}\n")
    tables = ((toolchain.LOCK, "toolchain"), (PARITY, "parity"), (RESOLVER, "resolver"))
    for target, table in tables:
        wanted = [f"{name}=={version}\n" for name, version in pinned.versions()[table].items()]
        _compile(uv, target, ["-"], "".join(wanted))


def _resolver() -> Path:
    home = store.folder("toolchain") / f"resolver-{store.sha256(RESOLVER)[:16]}"
    with store.lock("resolver"):
        if not (home / "bin" / "uv").exists():
            toolchain.install(toolchain.make_venv(home), RESOLVER)
    return home / "bin" / "uv"


def _compile(uv: Path, target: Path, arguments: list[str], given: str = "") -> None:
    command = [str(uv), "pip", "compile", "--quiet", "--universal", "--python-version=3.11"]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url"]
    target.parent.mkdir(exist_ok=True)
    done = subprocess.run(
        [*command, f"--output-file={target}", *arguments],
        input=given,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise BuildError(f"uv could not write {target.name}:\n{done.stderr[-2000:]}")
    target.write_text(HEAD + target.read_text().removeprefix(HEAD))
    store.say(f"{target.name}: {target.read_text().count('==')} packages")
