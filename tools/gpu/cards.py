"""GPUs for tests on any machine: Mesa's software device, which `layer.c` disguises as cards.

`Cards.environment()` has the variables that a process needs to see them;
`python -m tools.gpu.cards discrete:2000 COMMAND…` runs a command with them. On Debian a loader and
a driver of known versions are unpacked into the build cache, and nothing is installed; elsewhere
the system's are used.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from builds import store, vulkan
from builds.errors import BuildError

LAYER = "VK_LAYER_TEST_cards"
_SOURCE = Path(__file__).with_name("layer.c")
_SHARE = struct.Struct("8Q")
"""`Share` in `layer.c`: a process's bytes on each card."""
_LAST_SHARE = 255
"""Last entry of the state file; processes with a GPU take the first free ones."""


class NoCards(Exception):
    """This machine lacks something; the message says what."""


@dataclass(frozen=True, slots=True)
class Cards:
    """The cards of one test, such as `discrete:600,integrated:900:no-budget` (MiB)."""

    described: str
    state: Path
    """A file through which processes share the cards' memory."""

    def environment(self) -> dict[str, str]:
        """Return the variables that a process needs to see only these cards."""
        loader, driver = drivers()
        folder = self.state.parent
        self.state.touch()
        files = [folder / f"card{n}.json" for n in range(len(self.described.split(",")))]
        for file in files:  # the loader treats each as a driver with a device of its own
            icd = {"library_path": str(driver), "api_version": "1.3.0"}
            file.write_text(json.dumps({"file_format_version": "1.0.0", "ICD": icd}))
        # If the system's folder came first, another Python would also load its libpython.
        is_found = loader.is_relative_to("/usr")
        libraries = ["" if is_found else str(loader.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        shaders = store.folder("vulkan") / "shaders"
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "VK_DRIVER_FILES": os.pathsep.join(map(str, files)),
            "VK_LAYER_PATH": str(layer().parent),
            "VK_INSTANCE_LAYERS": LAYER,
            "MESA_SHADER_CACHE_DIR": str(shaders),
            "LP_NUM_THREADS": "2",
            "VK_TEST_CARDS": self.described,
            "VK_TEST_CACHE": str(self.state),  # the engine's walls allow it to write only to caches
        }

    @contextmanager
    def full(self) -> Iterator[None]:
        """Within this context, no card has memory left."""
        with self.state.open("r+b") as state:
            state.seek(_LAST_SHARE * _SHARE.size)
            state.write(_SHARE.pack(*[1 << 40] * 8))
            state.flush()
            fcntl.lockf(state, fcntl.LOCK_EX, 1, _LAST_SHARE)
            yield


@cache
def layer() -> Path:
    """Return the compiled layer, beside its manifest."""
    key = store.key({"source": store.sha256(_SOURCE), "machine": platform.machine()})
    home = store.folder("vulkan") / f"layer-{key}"
    if not home.is_dir():
        include = vulkan.sdk().include
        with store.lock("vulkan-layer"), store.replacing(home) as partial:
            library = partial / "libcards.so"
            line = ["cc", "-shared", "-fPIC", "-O1", f"-I{include}", "-pthread"]
            subprocess.run([*line, "-o", str(library), str(_SOURCE)], check=True)
            manifest = {
                "name": LAYER,
                "type": "GLOBAL",
                "library_path": "./libcards.so",
                "api_version": "1.3.0",
                "implementation_version": "1",
                "description": "software devices as GPUs",
            }
            text = json.dumps({"file_format_version": "1.2.0", "layer": manifest})
            (partial / "cards.json").write_text(text)
    return home / "libcards.so"


@cache
def drivers() -> tuple[Path, Path]:
    """Return the loader and Mesa's software driver; raises `NoCards` if they are not available."""
    try:
        root = _unpacked()
    except NoCards:
        root = Path("/")
    found = [
        next(iter(sorted(root.glob(f"usr/lib/*/{name}"))), None)
        for name in ("libvulkan.so.1", "libvulkan_lvp.so")
    ]
    if found[0] is None or found[1] is None:
        raise NoCards(
            "Mesa's software Vulkan driver is not installed (Debian: mesa-vulkan-drivers)"
        )
    _check(found[1])
    return found[0], found[1]


def _check(driver: Path) -> None:
    shown = subprocess.run(["ldd", driver], capture_output=True, text=True).stdout
    if missing := re.findall(r"(\S+) => not found", shown):
        raise NoCards(f"{driver.name} needs {', '.join(missing)}")


def _unpacked() -> Path:
    try:
        release = platform.freedesktop_os_release()["VERSION_CODENAME"]
    except (OSError, KeyError) as error:
        raise NoCards("its packages are only known for Debian") from error
    home = store.folder("vulkan") / f"drivers-{release}"
    with store.lock("vulkan-drivers"):
        if not home.is_dir():
            try:
                with store.replacing(home) as partial:
                    vulkan.unpack_debian(release, ["libvulkan1"], partial)
                    _unpack_newest(release, partial)
            except BuildError as error:
                raise NoCards(str(error)) from error
    return home


def _unpack_newest(release: str, target: Path) -> None:
    """Unpack the driver, from backports if they have it: memory budgets are a late feature."""
    try:
        vulkan.unpack_debian(f"{release}-backports", ["mesa-vulkan-drivers"], target)
    except BuildError:
        vulkan.unpack_debian(release, ["mesa-vulkan-drivers"], target)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="llorch-cards-") as folder:
        described = Cards(sys.argv[1], Path(folder, "state"))
        sys.exit(subprocess.call(sys.argv[2:], env=os.environ | described.environment()))
