"""Reads `versions.toml` and the flags of a backend; starts no process and uses no network."""

import platform
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from builds import processor
from builds.errors import BuildError

FOLDER = Path(__file__).resolve().parent
BACKENDS = tuple(sorted({path.stem for path in FOLDER.glob("*.toml")} - {"versions"}))
"""Those that have a recipe."""


@dataclass(frozen=True, slots=True)
class Pins:
    """The sources and tools of every wheel."""

    version: str
    sdist_sha256: str
    llama_cpp_commit: str
    toolchain: Mapping[str, str]

    @property
    def sdist_name(self) -> str:
        return f"llama_cpp_python-{self.version}.tar.gz"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one backend's wheel is compiled, and where each of its plug-ins goes."""

    backend: str
    cmake: Mapping[str, str]
    ship: tuple[str, ...]
    optional: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def cmake_args(self) -> list[str]:
        """As a shell would read them."""
        return [shlex.quote(f"-D{name}={value}") for name, value in sorted(self.cmake.items())]


@cache
def versions() -> dict[str, Any]:
    return _read(FOLDER / "versions.toml")


def pins() -> Pins:
    table = versions()
    source = table["llama-cpp-python"]
    return Pins(
        version=source["version"],
        sdist_sha256=source["sha256"],
        llama_cpp_commit=source["llama_cpp_commit"],
        toolchain=table["toolchain"],
    )


def recipe(
    backend: str,
    *,
    native: bool = False,
    blas: bool = False,
    sanitized: bool = False,
    architectures: tuple[str, ...] = (),
) -> Recipe:
    """The backend's flags, overridden by those of the chosen variations."""
    table = _read(FOLDER / f"{backend}.toml")
    layers = [table]
    if platform.system() == "Linux" and "linux" in table:
        layers.append(table["linux"])
    for wanted, name in ((native, "native"), (blas, "blas"), (sanitized, "sanitized")):
        if wanted and name not in table:
            raise BuildError(f"--{name} does not apply to the {backend} backend.")
        if wanted:
            layers.append(table[name])
    cmake: dict[str, str] = {}
    plugins: dict[str, list[str]] = {}
    for layer in layers:
        cmake |= layer["cmake"]
        plugins |= layer.get("plugins", {})
    if native:
        cmake |= processor.native_flags()
    if "architectures" in table:
        chosen = architectures or tuple(versions()[backend]["architectures"])
        cmake[table["architectures"]["flag"]] = ";".join(chosen)
    elif architectures:
        raise BuildError(f"--arch does not apply to the {backend} backend.")
    return Recipe(
        backend=backend,
        cmake=cmake,
        ship=tuple(plugins["ship"]),
        optional=tuple(plugins.get("optional", ())),
        test=tuple(plugins.get("test", ())),
        environment=table.get("environment", {}),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise BuildError(f"{path} is not valid TOML: {error}.") from error
