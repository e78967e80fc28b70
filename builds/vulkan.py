"""What a Vulkan build needs beside the C++ compiler: headers, a loader to link to, and glslc.

Those of Debian 12 and Ubuntu 22.04 are too old for ggml's shaders. On Debian they are then taken
from the packages of a later release, unpacked into the cache: apt checks their signatures, and
nothing on the system changes. Elsewhere `VULKAN_SDK` names an SDK, as its installer sets it.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from builds import pins as pinned
from builds import store
from builds.errors import BuildError

HEADER = Path("vulkan/vulkan_core.h")
LEAST_HEADERS = (1, 4, 300)
"""The first with all that ggml's Vulkan code names."""
LEAST_GLSLC = (2024, 4)
"""Earlier ones lack the shaders for cooperative matrices and integer dot products."""
PACKAGES = ("libvulkan-dev", "libvulkan1", "spirv-headers")
# glslc runs through the loader and C library that it was linked with.
PROGRAM_PACKAGES = ("glslc", "libshaderc1", "libc6", "libgcc-s1", "libstdc++6")


@dataclass(frozen=True, slots=True)
class Sdk:
    """Where the parts lie."""

    include: Path
    library: Path
    glslc: Path
    spirv: Path
    """The folder of SPIRV-Headers' CMake package."""
    version: str
    """Of the headers and of glslc."""


def compiler() -> str:
    """The version of the headers and of glslc; raises BuildError if none are to be had."""
    return sdk().version


def completion() -> list[str]:
    """CMake arguments that say where the parts lie."""
    found = sdk()
    return [
        f"-DVulkan_INCLUDE_DIR={found.include}",
        f"-DVulkan_LIBRARY={found.library}",
        f"-DVulkan_GLSLC_EXECUTABLE={found.glslc}",
        f"-DSPIRV-Headers_DIR={found.spirv}",
    ]


def sdk() -> Sdk:
    """The SDK of `VULKAN_SDK`, the system's, or Debian's of a later release, whichever is new
    enough first."""
    named = os.environ.get("VULKAN_SDK")
    for root in [Path(named)] if named else [Path("/usr"), Path("/usr/local")]:
        found = _sdk_in(root)
        if found is not None:
            return found
    if named:
        raise BuildError(f"VULKAN_SDK={named} holds no Vulkan SDK that is new enough. {_wanted()}")
    if shutil.which("apt-get") is None or not Path("/etc/debian_version").exists():
        raise BuildError(_wanted())
    return _from_debian()


def _wanted() -> str:
    headers, glslc = (".".join(map(str, each)) for each in (LEAST_HEADERS, LEAST_GLSLC))
    return (
        f"A Vulkan build needs Vulkan headers {headers} or later, SPIRV-Headers and glslc {glslc} "
        "or later: install Debian 13's libvulkan-dev, spirv-headers and glslc, or a Vulkan SDK "
        "that VULKAN_SDK names, or build in its image: make image-vulkan."
    )


def _sdk_in(root: Path, glslc: Path | None = None) -> Sdk | None:
    include = root / "include"
    if not (include / HEADER).is_file():
        return None
    headers = _header_version(include / HEADER)
    program = glslc or _program(root)
    libraries = [*root.glob("lib/*/libvulkan.so"), *root.glob("lib*/libvulkan.so")]
    packages = list(root.glob("**/cmake/SPIRV-Headers/SPIRV-HeadersConfig.cmake"))
    if headers < LEAST_HEADERS or program is None or not libraries or not packages:
        return None
    shown = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"shaderc v?(\d+)\.(\d+)", shown)
    if release is None or (int(release[1]), int(release[2])) < LEAST_GLSLC:
        return None
    version = f"Vulkan headers {'.'.join(map(str, headers))}, {release[0]}"
    return Sdk(include, libraries[0], program, packages[0].parent, version)


def _program(root: Path) -> Path | None:
    found = shutil.which("glslc", path=str(root / "bin"))
    return Path(found) if found else None


def _header_version(header: Path) -> tuple[int, ...]:
    text = header.read_text(errors="replace")
    patch = re.search(r"^#define VK_HEADER_VERSION (\d+)", text, re.MULTILINE)
    complete = re.search(
        r"^#define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION\(\d+, (\d+), (\d+),",
        text,
        re.MULTILINE,
    )
    if patch is None or complete is None:
        return ()
    return int(complete[1]), int(complete[2]), int(patch[1])


# --- Debian's packages -------------------------------------------------------------------


def _from_debian() -> Sdk:
    release = str(pinned.versions()["vulkan"]["debian"])
    home = store.folder("vulkan") / f"sdk-{release}"
    with store.lock(f"vulkan-sdk-{release}"):
        if not home.is_dir():
            store.say(f"this system's Vulkan headers are too old; taking those of Debian {release}")
            with store.replacing(home) as partial:
                unpack_debian(release, PACKAGES, partial)
                unpack_debian(release, PROGRAM_PACKAGES, partial / "program")
    found = _sdk_in(home / "usr", _wrapped(home / "program"))
    if found is None:
        raise BuildError(f"Debian {release} has no Vulkan SDK that is new enough. {_wanted()}")
    return found


def _wrapped(root: Path) -> Path:
    """A script that runs the unpacked glslc with its own C library."""
    script = root / "glslc"
    loader = next(root.glob("usr/lib*/ld-linux-*.so.*"), None) or next(
        root.glob("usr/lib/*/ld-linux-*.so.*")
    )
    (libraries,) = {path.parent for path in root.glob("usr/lib/*/libshaderc.so.1")}
    line = [str(loader), "--library-path", str(libraries), str(root / "usr/bin/glslc")]
    text = f'#!/bin/sh\nexec {shlex.join(line)} "$@"\n'
    if not script.exists() or script.read_text() != text:
        script.write_text(text)
        script.chmod(0o755)
    return script


def unpack_debian(release: str, packages: Iterable[str], target: Path) -> None:
    """Unpack packages of a Debian release under `target`; nothing is installed.

    Raises:
        BuildError: apt-get or dpkg failed; it has their words.
    """
    target.mkdir(parents=True, exist_ok=True)
    work = target / ".apt"
    for name in ("lists/partial", "archives/partial", "debs"):
        (work / name).mkdir(parents=True, exist_ok=True)
    (work / "status").touch()
    lines = [f"deb {uri} {release} main\n" for uri in _mirrors()]
    (work / "sources.list").write_text("".join(lines))
    options = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache::Archives": work / "archives",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    _run([*apt, "update"], work)
    _run([*apt, "download", *packages], work / "debs")
    for archive in sorted((work / "debs").glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(target)], work)
    shutil.rmtree(work)


def _mirrors() -> list[str]:
    """Where this system has Debian's own packages from."""
    shown = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(LABEL)"],
        capture_output=True,
        text=True,
    ).stdout
    uris = {line.split()[0] for line in shown.splitlines() if line.endswith(" Debian")}
    if not uris:
        raise BuildError(f"apt-get knows no mirror of Debian: run 'apt-get update'. {_wanted()}")
    return sorted(uris)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command[:1])} failed: {done.stderr.strip()[-1000:]}")
