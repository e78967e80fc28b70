"""The wheel of a backend: from the cache when pin, flags and compiler are the same, else compiled.

A build's home in the cache holds the wheel, SHA256SUMS and `test-plugins/` with what only the tests
load.
"""

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builds import compile, cuda, repack, sdist, store, toolchain
from builds.errors import BuildError
from builds.pins import Pins, Recipe

# Raised when repack or compile change so much that builds in the cache must not be used any more.
LAYOUT = 1


@dataclass(frozen=True, slots=True)
class BuiltWheel:
    """A finished build in the cache."""

    path: Path
    key: str

    @property
    def test_plugins(self) -> list[Path]:
        return sorted(self.path.parent.glob("test-plugins/*"))


def stamp(recipe: Recipe, pins: Pins) -> dict[str, Any]:
    """All that decides what comes out; goes into the wheel and, hashed, names it in the cache."""
    nvcc = {"nvcc": cuda.compiler()} if "GGML_CUDA" in recipe.cmake else {}
    return {
        **nvcc,
        "backend": recipe.backend,
        "llama_cpp_python": pins.version,
        "llama_cpp_commit": pins.llama_cpp_commit,
        "sdist_sha256": pins.sdist_sha256,
        "flags": dict(recipe.cmake),
        "environment": dict(recipe.environment),
        "compiler": toolchain.compiler(),
        "toolchain": dict(pins.toolchain),
        "platform": compile.platform_name(),
        "layout": LAYOUT,
    }


def key(recipe: Recipe, pins: Pins) -> str:
    choices = [*recipe.ship, "|", *recipe.optional, "|", *recipe.test]
    text = json.dumps([stamp(recipe, pins), choices], sort_keys=True)
    return f"{recipe.backend}-{pins.version}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def build(recipe: Recipe, pins: Pins, *, given_sdist: Path | None = None) -> BuiltWheel:
    """The wheel for these choices; several minutes the first time."""
    name = key(recipe, pins)
    home = store.folder("wheels") / name
    with store.lock(name):
        if not is_whole(home):
            archive = sdist.fetch(pins, given_sdist)
            with (
                store.replacing(home) as partial,
                tempfile.TemporaryDirectory(prefix="llorch-build-") as scratch,
            ):
                _make(archive, recipe, pins, Path(scratch).resolve(), partial)
    (wheel,) = home.glob("*.whl")
    return BuiltWheel(wheel, name)


def export(built: BuiltWheel, target: Path) -> Path:
    """Copies the wheel and its SHA256SUMS into `target`, which holds nothing else afterwards."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for source in (built.path, built.path.parent / "SHA256SUMS"):
        shutil.copy2(source, target / source.name)
    return target / built.path.name


def _make(archive: Path, recipe: Recipe, pins: Pins, work: Path, home: Path) -> None:
    upstream = compile.compile_wheel(archive, recipe, pins, work)
    source = work / "source"
    licenses = {"llama.cpp-LICENSE": (source / "vendor/llama.cpp/LICENSE").read_bytes()}
    wheel, _ = repack.repack(upstream, recipe, stamp(recipe, pins), licenses, home)
    (home / "SHA256SUMS").write_text(f"{store.sha256(wheel)}  {wheel.name}\n")


def is_whole(home: Path) -> bool:
    """Whether the cached build is there and still what SHA256SUMS says."""
    try:
        expected, name = (home / "SHA256SUMS").read_text().split()
        return store.sha256(home / name) == expected
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise BuildError(
            f"{home}/SHA256SUMS is damaged; remove {home} and run this again."
        ) from error
