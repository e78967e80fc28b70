"""The Dockerfiles and the command that builds them; what takes minutes is in system/images."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from builds import images
from builds import pins as pinned
from builds.errors import BuildError

ROOT = pinned.FOLDER.parent
DOCKERFILES = {path.suffix.removeprefix("."): path for path in ROOT.glob("Dockerfile.*")}


def instructions(backend: str) -> list[str]:
    text = DOCKERFILES[backend].read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_there_is_an_image_per_hardware() -> None:
    assert DOCKERFILES.keys() == {"cpu", "cuda", "vulkan", "metal"}


@pytest.mark.parametrize("backend", DOCKERFILES)
def test_base_images_are_the_pinned_ones(backend: str) -> None:
    defaults = dict(
        line.removeprefix("ARG ").split("=", 1)
        for line in instructions(backend)
        if re.match(r"ARG (\w+_IMAGE|CUBLAS)=", line)
    )
    assert defaults == pinned.versions()["images"][backend]


def test_given_arguments_win_over_the_pin() -> None:
    values = images.arguments("cuda", "cuda12", ["RUNTIME_IMAGE=mine", "ARCH=90"])
    assert values["RUNTIME_IMAGE"] == "mine"
    assert values["ARCH"] == "90"
    assert "12.9" in values["BUILD_IMAGE"]
    assert values["VERSION"]
    with pytest.raises(BuildError, match="NAME=VALUE is needed"):
        images.arguments("cpu", given=["ARCH"])
    with pytest.raises(BuildError, match="no image for cuda11"):
        images.arguments("cuda", "cuda11")


def test_without_any_tool_a_sentence_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="None of docker"):
        images.tool()


def test_a_docker_client_without_its_engine_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, code in (("docker", 1), ("podman", 0)):
        script = tmp_path / name
        script.write_text(f"#!{shutil.which('sh')}\nexit {code}\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert images.tool() == "podman"
