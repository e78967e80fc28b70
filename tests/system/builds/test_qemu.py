"""The CPU wheel on emulated processors, under qemu-user: `make qemu-test`.

qemu emulates at most AVX2, so AVX-512 variants are tested only on machines that have it.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from builds import smoke
from builds.pins import FOLDER

QEMU = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(QEMU is None, reason="needs qemu-user: apt-get install qemu-user-static"),
]


def emulated(cpu: str) -> tuple[str, ...]:
    assert QEMU is not None
    return (QEMU, "-cpu", cpu)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("model") / "tiny.gguf"
    smoke.convert_bundled(Path(sys.executable), target)
    return target


@pytest.mark.parametrize(
    ("cpu", "variant"),
    [
        ("Nehalem", "sse42"),  # x86-64-v2
        ("SandyBridge", "sandybridge"),
        ("IvyBridge", "ivybridge"),
        ("Haswell", "haswell"),  # x86-64-v3
        ("EPYC-Rome", "haswell"),  # Zen 2
    ],
)
def test_the_best_variant_is_taken_and_decodes_a_token(
    cpu: str, variant: str, tiny_gguf: Path
) -> None:
    report = smoke.run_child(Path(sys.executable), tiny_gguf, emulated(cpu))
    assert report["plugins_loaded"] == [f"libggml-cpu-{variant}.so"]
    assert report["decoded"]["tokens"] == 1
    assert report["decoded"]["text"] == " time"


@pytest.mark.parametrize("cpu", ["qemu64", "Conroe", "Penryn"])
def test_below_the_floor_comes_a_sentence_and_exit_code_4(cpu: str) -> None:
    command = [*emulated(cpu), sys.executable, str(Path(sys.prefix, "bin", "llorch-cpu"))]
    result = subprocess.run(
        [*command, "--port", "0"], cwd=FOLDER.parent, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 4
    assert "the worker needs x86-64-v2" in result.stderr
    assert "Traceback" not in result.stderr
