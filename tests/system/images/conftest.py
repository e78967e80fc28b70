"""The images: given ones (`LLORCH_TEST_IMAGE`, `LLORCH_TEST_VULKAN_IMAGE`), else built here from
their Dockerfiles.

Their base is Debian's own, made with debootstrap, so that no image registry is needed. Packages
come from the machine's package index, whose certificate is lent to the build and to nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from builds import images
from tests.system.images.container import environment, podman

RELEASE = "trixie"
BASE = f"localhost/llorch-base:{RELEASE}"
FIGURES: dict[str, float] = {}


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    return os.environ.get("LLORCH_TEST_IMAGE") or _built("cpu", [], tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="session")
def vulkan_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With Mesa's drivers, among which is the software device."""
    if given := os.environ.get("LLORCH_TEST_VULKAN_IMAGE"):
        return given
    drivers = ["DRIVERS=mesa-vulkan-drivers"]
    return _built("vulkan", drivers, tmp_path_factory.mktemp("vulkan"))


def _built(backend: str, given: list[str], folder: Path) -> str:
    needs_tools()
    if subprocess.run(["podman", "image", "exists", BASE], env=environment()).returncode != 0:
        _bootstrap(BASE)
    podman("run", "--rm", "--network=none", BASE, "true")  # minutes before a build would need it
    pip = folder / "pip.conf"
    pip.write_text("[global]\ncert = /etc/lent-ca.crt\n")
    bundle = os.environ.get("PIP_CERT") or ssl.get_default_verify_paths().cafile
    npm = folder / "npmrc"
    npm.write_text("cafile = /etc/lent-ca.crt\n")
    files = {bundle: "/etc/lent-ca.crt", pip: "/etc/pip.conf", npm: "/root/.npmrc"}
    lent = [f"--volume={ours}:{theirs}:ro" for ours, theirs in files.items()]
    tag = f"localhost/llorch-{backend}:test"
    line = images.command(
        "podman",
        backend,
        tag,
        images.arguments(backend, given=[f"BASE_IMAGE={BASE}", *given]),
        # No intermediate layers: this storage driver copies the whole image for each.
        ["--network=host", "--layers=false", *(lent if bundle else [])],
    )
    started = time.monotonic()
    done = subprocess.run(line, env=environment())
    assert done.returncode == 0, "the image could not be built; podman's words are above"
    FIGURES[f"{backend}_build_s"] = time.monotonic() - started
    return tag


def needs_tools() -> None:
    """Ends the run with a sentence, before anything is built, when something is not installed."""
    tools = ["podman", "debootstrap"]
    if Path("/sys/fs/cgroup/unified").exists():
        tools.append("runc")  # crun refuses cgroups in hybrid mode
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        install = f"apt-get install {' '.join(tools)}"
        pytest.exit(f"make image-test lacks {', '.join(missing)}: {install}", 1)


def _bootstrap(tag: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["debootstrap", "--variant=minbase", RELEASE, folder],
            check=True,
            capture_output=True,
        )
        # As in Debian's slim images: no documentation, no package lists.
        for unneeded in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/lib/apt/lists"):
            shutil.rmtree(Path(folder, unneeded), ignore_errors=True)
        for archive in Path(folder, "var/cache/apt/archives").glob("*.deb"):
            archive.unlink()
        tar = subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE)
        assert tar.stdout is not None
        with tar:
            subprocess.run(
                ["podman", "import", "-", tag], stdin=tar.stdout, env=environment(), check=True
            )


@pytest.fixture(scope="session")
def figures() -> dict[str, float]:
    """What the tests measured; told at the end of the run."""
    return FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        rounded = {name: round(value, 1) for name, value in FIGURES.items()}
        terminalreporter.write_line(f"figures: {json.dumps(rounded)}")


def image_size_bytes(image: str) -> int:
    return int(podman("image", "inspect", "--format", "{{.Size}}", image))
