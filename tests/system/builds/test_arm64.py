"""The worker on emulated arm64 processors: `make qemu-test`.

Debian 13's cross compiler builds the CPU wheel with all variants, which is installed with the
worker and its packages into an unpacked Debian root for arm64. qemu runs that root's programs in a
user namespace, so that nothing is registered on the system. Minutes of compiling, once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from builds import locks, smoke, store, toolchain
from builds.pins import FOLDER, pins
from tests.support import sse
from tests.support.ports import free_port
from tests.system.images.container import RELEASE, base, lent, podman

QEMU = "/usr/bin/qemu-aarch64-static"
TOOLS = ("podman", "debootstrap", "dpkg", "unshare")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, (QEMU, *TOOLS))),
        reason="needs root, podman, debootstrap and qemu-user-static",
    ),
]
START_SECONDS = 600
CROSS = """
import os, platform
from dataclasses import replace
from builds import pins, toolchain, wheels

recipe = pins.recipe("cpu")
toolchain.python(pins.pins())  # runs here
platform.machine = lambda: "aarch64"
os.environ |= {
    "CC": "aarch64-linux-gnu-gcc",
    "CXX": "aarch64-linux-gnu-g++",
    "_PYTHON_HOST_PLATFORM": "linux-aarch64",
}
flags = {"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64"}
built = wheels.build(replace(recipe, cmake={**recipe.cmake, **flags}), pins.pins())
print(built.relative_to(built.parents[2]))
"""
PACKAGES = "ca-certificates g++-aarch64-linux-gnu pkg-config python3 python3-venv"
ELF_AARCH64 = (
    r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:"
    r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
)
ENTER = f"""
set -e
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf '%s' ':arm64:M::{ELF_AARCH64}:{QEMU}:F' > /proc/sys/fs/binfmt_misc/register
for folder in dev proc; do mount --rbind /$folder "$0/$folder"; done
exec chroot "$0" "$@"
"""
"""With the flag F the interpreter is opened immediately, so it need not be in the root."""
VARIANTS = {
    "cortex-a53": "libggml-cpu-armv8.0_1.so",
    "cortex-a76": "libggml-cpu-armv8.2_2.so",
    "neoverse-n1": "libggml-cpu-armv8.2_2.so",
}


def entered(root: Path, *command: str) -> list[str]:
    namespaces = ["unshare", "--user", "--map-root-user", "--mount"]
    return [*namespaces, "sh", "-c", ENTER, str(root), *command]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The given wheel (`LLORCH_TEST_ARM64_WHEEL`), or a compiled one."""
    if built_before := os.environ.get("LLORCH_TEST_ARM64_WHEEL"):
        return Path(built_before)
    script = f"""
    apt-get -qq update && apt-get -qq install --no-install-recommends {PACKAGES} > /dev/null
    cd /src && exec python3 -B -c '{CROSS}'
    """
    options = [
        f"--volume={FOLDER.parent}:/src:ro",
        f"--volume={store.folder()}:/root/.cache/llorch-worker",
        *lent(tmp_path_factory.mktemp("lent")),
        "--network=host",
        "--rm",
    ]
    made = podman("run", *options, base(), "sh", "-ec", script, timeout_s=7000)
    return store.folder() / made.splitlines()[-1]


@pytest.fixture(scope="module")
def root(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like the root of an arm64 image, except for its users and configured packages."""
    folder = tmp_path_factory.mktemp("arm64") / "root"
    packages = "--include=ca-certificates,libgomp1,libstdc++6,python3"
    bootstrap = ["debootstrap", "--foreign", "--arch=arm64", "--variant=minbase", packages]
    subprocess.run([*bootstrap, RELEASE, str(folder)], check=True, capture_output=True)
    for archive in (folder / "var/cache/apt/archives").glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(archive), str(folder)], check=True)
    _install(folder, "--require-hashes", f"--requirement={locks.RUNTIME}")
    _install(folder, str(wheel))
    worker = toolchain.packed(pins(), FOLDER.parent, folder / "tmp/packed")
    _install(folder, str(worker))
    smoke.convert_bundled(Path(sys.executable), folder / "tmp/tiny.gguf")
    shutil.copy2(smoke.CHILD, folder / "tmp/child.py")
    return folder


def _install(root: Path, *what: str) -> None:
    """Install with the test machine's pip for a Debian 13 on arm64."""
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    tags = ["linux", *(f"manylinux_2_{minor}" for minor in range(17, 42)), "manylinux2014"]
    line += [f"--platform={tag}_aarch64" for tag in tags]
    line += ["--python-version=3.13", "--implementation=cp"]
    target = f"--target={root / 'usr/lib/python3/dist-packages'}"
    subprocess.run([*line, target, *what], check=True)


@pytest.mark.parametrize("cpu", VARIANTS)
def test_the_best_variant_is_taken_and_decodes_a_token(root: Path, cpu: str) -> None:
    command = entered(root, "/usr/bin/python3", "-I", "/tmp/child.py", "/tmp/tiny.gguf")
    environment = os.environ | {"QEMU_CPU": cpu}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    print(cpu, report["plugins_loaded"], report["decoded"])
    assert report["plugins_loaded"] == [VARIANTS[cpu]]
    assert report["decoded"]["text"] == " time"


def test_the_worker_streams_a_token_and_stops(root: Path) -> None:
    """Through its command, with a separate engine process; qemu has no seccomp filters."""
    port = free_port()
    code = "import sys; from worker.cli import cpu; sys.exit(cpu())"
    command = entered(root, "/usr/bin/python3", "-c", code, "--port", str(port), "--no-confine")
    environment = {"PATH": "/usr/sbin:/usr/bin", "HOME": "/tmp", "QEMU_CPU": "neoverse-n1"}
    began = time.monotonic()
    with subprocess.Popen([*command, "--model", "/tmp/tiny.gguf"], env=environment) as worker:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
                _wait_ready(client, worker)
                ready = time.monotonic()
                body = {"job_id": "arm", "prompt": "Once upon a time", "max_tokens": 8}
                with client.stream("POST", "/execute", json=body) as response:
                    stream = sse.collect(response.iter_raw())
                info = client.get("/info").json()
            print(f"ready {ready - began:.0f} s, 8 tokens {time.monotonic() - ready:.1f} s")
            assert stream.end["tokens_out"] > 0
            assert "aarch64" in json.dumps(info["engine"]["build"])
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 0
        finally:
            worker.kill()


def _wait_ready(client: httpx.Client, worker: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert worker.poll() is None, "the worker left"
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError("the worker was not ready")
