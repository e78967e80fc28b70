"""Only arm64 variants that the compiler cannot build are left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builds import pins as pinned
from builds import sdist, toolchain, variants
from builds.errors import BuildError

ALL = ["armv8.0_1", "armv8.2_1", "armv8.2_2", "armv8.2_3"]
ALL += ["armv8.6_1", "armv8.6_2", "armv9.2_1", "armv9.2_2"]


@pytest.fixture(scope="module")
def listing() -> str:
    return (sdist.unpacked(pinned.pins()) / variants.LISTING).read_text()


def names(listing: str) -> list[str]:
    return [match["name"] for match in variants.VARIANT.finditer(listing)]


def test_variants_with_a_refused_feature_are_left_out(listing: str) -> None:
    assert names(listing) == ALL
    text, left_out = variants.without(listing, ["SME"])
    assert left_out == ["armv9.2_1", "armv9.2_2"] and names(text) == ALL[:-2]
    kept = [line for line in listing.splitlines() if not re.search(r"\(armv9", line)]
    assert text.splitlines() == kept


def compiler(folder: Path, target: str, *, knows: bool) -> str:
    """A fake compiler with the needed answers."""
    script = folder / "c++"
    script.write_text(
        f"#!/bin/sh\n[ $1 = -dumpmachine ] && echo {target} && exit 0\n"
        f"[ $1 = --version ] && echo 'c++ 12' && exit 0\nexit {int(not knows)}\n"
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("target", "knows", "expected"),
    [
        ("aarch64-linux-gnu", False, ["SME"]),
        ("aarch64-linux-gnu", True, []),
        ("x86_64-linux-gnu", False, []),
    ],
)
def test_the_compiler_decides_which_features_are_refused(
    target: str,
    knows: bool,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, target, knows=knows))
    assert toolchain.target() == target
    assert variants.refused() == expected


def test_variants_left_out_are_reported(
    listing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "aarch64-linux-gnu", knows=False))
    (tmp_path / variants.LISTING).parent.mkdir(parents=True)
    (tmp_path / variants.LISTING).write_text(listing)
    variants.leave_out(tmp_path, ["SME"])
    assert names((tmp_path / variants.LISTING).read_text()) == ALL[:-2]
    assert "no variants armv9.2_1, armv9.2_2" in capsys.readouterr().err
    with pytest.raises(BuildError, match="does not list the arm64 variants as expected"):
        variants.leave_out(tmp_path, ["SME"])
