"""The Dockerfiles and the command that builds them; what needs minutes is in tests/images."""

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


def final_stage(backend: str) -> list[str]:
    lines = instructions(backend)
    last = max(index for index, line in enumerate(lines) if line.startswith("FROM"))
    return lines[last:]


def test_there_is_an_image_per_hardware() -> None:
    assert DOCKERFILES.keys() == {"cpu", "cuda", "metal"}


@pytest.mark.parametrize("backend", ["cpu", "cuda", "metal"])
def test_base_images_are_the_pinned_ones(backend: str) -> None:
    defaults = dict(
        line.removeprefix("ARG ").split("=", 1)
        for line in instructions(backend)
        if re.match(r"ARG \w+_IMAGE=", line)
    )
    assert defaults == pinned.versions()["images"][backend]


@pytest.mark.parametrize("pin", ["cpu", "cuda", "cuda12", "metal"])
def test_every_base_image_has_a_digest(pin: str) -> None:
    for name, reference in pinned.versions()["images"][pin].items():
        assert re.fullmatch(r"docker\.io/[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", reference), name


@pytest.mark.parametrize("backend", ["cpu", "cuda", "metal"])
def test_the_final_stage_is_what_the_contract_asks(backend: str) -> None:
    stage = final_stage(backend)
    text = "\n".join(stage)
    assert "USER 10001:10001" in stage
    assert "STOPSIGNAL SIGTERM" in stage
    assert 'VOLUME ["/cache", "/models"]' in stage
    assert f'ENTRYPOINT ["llorch-{backend}"]' in stage
    assert "/health" in next(line for line in stage if line.startswith("HEALTHCHECK"))
    assert not re.search(r"g\+\+|build-essential|cmake", text)


def test_the_build_context_holds_only_what_is_copied() -> None:
    allowed = [
        line.removeprefix("!").rstrip("/*")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for backend in DOCKERFILES:
        copied = [line.split()[1:-1] for line in instructions(backend) if line.startswith("COPY")]
        for source in (each for names in copied for each in names if not each.startswith("--from")):
            if source.startswith("/"):
                continue  # from the first stage
            assert any(source == one or source.startswith(f"{one}/") for one in allowed), source


@pytest.mark.parametrize("tool", images.TOOLS)
def test_the_command_line_of_each_tool(tool: str) -> None:
    line = images.command(tool, "cpu", "tag", {"B": "2", "A": "1"}, ["--network=host"])
    assert line[:2] == [tool, "build"]
    assert ("--format" in line) == (tool != "docker")
    assert line.index("--build-arg=A=1") < line.index("--build-arg=B=2")
    assert line[-3:] == [f"--file={ROOT}/Dockerfile.cpu", "--tag=tag", str(ROOT)]


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
