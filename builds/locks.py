"""The locks: every package that is installed, by version and hash. Nothing else is installed.

`runtime.txt` has what a worker needs, `test.txt` also what the tests need, `page.txt` also what
drives a browser, and `fleet.txt` what a worker and Ray need. `tools.txt` builds wheels, `node.txt`
the chat page, `cuda.txt` completes a CUDA toolkit, `parity.txt` has what the converter is compared
with, and `resolver.txt` writes the locks. They hold for every system and Python that the worker
supports. They name no index, because the machine's own is used.
"""

import subprocess
from pathlib import Path

from builds import lighthouse, store, toolchain
from builds import pins as pinned
from builds.errors import BuildError

FOLDER = pinned.FOLDER / "locks"
RUNTIME, TEST, PAGE, FLEET, CUDA, PARITY, RESOLVER = (
    FOLDER / f"{name}.txt"
    for name in ("runtime", "test", "page", "fleet", "cuda", "parity", "resolver")
)
HEAD = "# Written by `make lock`.\n"
PROJECT = str(pinned.FOLDER.parent / "pyproject.toml")


def write(upgrade: bool) -> None:
    """Write all locks; without `upgrade`, locked packages keep their versions."""
    uv = toolchain.of_lock(RESOLVER, "uv").with_name("uv")
    newest = ["--upgrade"] if upgrade else []
    project = [PROJECT, *newest]
    _compile(uv, TEST, [*project, "--extra=test"])
    _compile(uv, PAGE, [*project, "--extra=test", "--extra=page", f"--constraint={TEST}"])
    _compile(uv, RUNTIME, [*project, f"--constraint={TEST}"])
    _compile(uv, FLEET, [*project, "--extra=ray", f"--constraint={TEST}"])
    _compile(uv, CUDA, ["-"], f"nvidia-cublas=={pinned.versions()['cuda']['nvidia-cublas']}\n")
    tables = (
        (toolchain.LOCK, "toolchain"),
        (toolchain.NODE_LOCK, "node"),
        (PARITY, "parity"),
        (RESOLVER, "resolver"),
    )
    for target, table in tables:
        wanted = [f"{name}=={version}\n" for name, version in pinned.versions()[table].items()]
        _compile(uv, target, ["-"], "".join(wanted))
    lighthouse.lock(upgrade=upgrade)


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
