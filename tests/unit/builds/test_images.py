"""The Dockerfiles and the command that builds them; slow tests are in system/images."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import cast

import pytest
import yaml

from builds import cli, images
from builds import pins as pinned
from builds.errors import BuildError
from tests import ROOT
from worker.flags import parse_flags
from worker.settings import FIELDS, Settings
from worker.wire.backends import BACKENDS, BackendName

DOCKERFILES = {backend: ROOT / f"Dockerfile.{backend}" for backend in images.BACKENDS}


def instructions(backend: str) -> list[str]:
    text = DOCKERFILES[backend].read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_there_is_an_image_per_hardware() -> None:
    """Except for macOS itself, because images run on Linux. Each has a make target."""
    assert set(images.BACKENDS) == BACKENDS.keys() - {"accelerate"}
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert all(f"\nimage-{backend}:" in makefile for backend in images.BACKENDS)


@pytest.mark.parametrize("backend", DOCKERFILES)
def test_base_images_are_the_pinned_ones(backend: str) -> None:
    defaults = dict(
        line.removeprefix("ARG ").split("=", 1)
        for line in instructions(backend)
        if re.match(r"ARG (\w+_IMAGE|CUBLAS)=", line)
    )
    assert defaults == pinned.versions()["images"][backend]


@pytest.mark.parametrize("backend", DOCKERFILES)
def test_an_image_stops_gently_and_its_check_follows_the_worker(backend: str) -> None:
    lines = instructions(backend)
    assert "STOPSIGNAL SIGTERM" in lines
    assert any(line.endswith(f'CMD ["llorch-{backend}", "health"]') for line in lines)


def test_an_images_name_begins_with_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(images, "build", lambda _backend, tag, **_options: built.append(tag))
    for flags in ([], ["--registry="], ["--registry", "registry.example/team/"]):
        assert cli.main(["image", "cpu", *flags]) == 0
    assert built == ["llorch-cpu", "llorch-cpu", "registry.example/team/llorch-cpu"]


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


def test_a_missing_container_tool_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


PAGES = [ROOT / "README.md", ROOT / "builds/README.md", *ROOT.glob("docs/*.md")]
RUN_LINES = sorted(
    {
        line.strip("#` ")
        for page in (*PAGES, *DOCKERFILES.values())
        for line in re.findall(r"(?:docker|podman) run [^`\n]+", page.read_text("utf-8"))
    }
)


def folders(backend: str) -> set[str]:
    """Return the folders that are created for the image's user, so that volumes there are
    writable."""
    return set(re.findall(r"install --directory .*? (/\w+)", "\n".join(instructions(backend))))


def port(backend: str) -> str:
    (exposed,) = [line for line in instructions(backend) if line.startswith("EXPOSE ")]
    return exposed.removeprefix("EXPOSE ")


@pytest.mark.parametrize("line", RUN_LINES)
def test_a_line_that_runs_an_image_fits_the_image(line: str) -> None:
    words = shlex.split(line, comments=True)
    (at,) = [n for n, word in enumerate(words) if word.startswith("llorch-")]
    backend, arguments = words[at].removeprefix("llorch-"), words[at + 1 :]
    if arguments and arguments[0].startswith("("):
        arguments = []  # a comment
    options = list(zip(words[:at], words[1:at], strict=False))
    assert [value for name, value in options if name == "-p"] == [f"8080:{port(backend)}"]
    mounts = {value.split(":")[1] for name, value in options if name == "-v"}
    assert mounts <= folders(backend)
    flags = parse_flags(cast(BackendName, backend), arguments, None)
    model = str(flags.get("model", ""))
    assert not model.startswith("/") or any(model.startswith(mount) for mount in mounts)
    assert not model.startswith("hf:") or "/cache" in mounts, "else it is downloaded each time"


def test_the_compose_file_fits_the_image() -> None:
    (worker,) = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"].values()
    backend = worker["image"].removeprefix("${REGISTRY:-}llorch-")
    assert worker["build"]["dockerfile"] == DOCKERFILES[backend].name
    assert all(each.rsplit(":", 1)[1] == port(backend) for each in worker["ports"])
    assert {each.split(":")[1] for each in worker["volumes"]} == folders(backend)
    variables = {f"LLORCH_{name.upper()}" for name in FIELDS}
    assert set(worker["environment"]) - {"HF_TOKEN"} <= variables
    grace = float(worker["stop_grace_period"].removesuffix("s"))
    assert grace > Settings.load("cpu", {}).drain_timeout + 5
