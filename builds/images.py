"""Builds a backend's container image with docker, podman or buildah."""

import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from builds import pins as pinned
from builds import store
from builds.errors import BuildError

ROOT = pinned.FOLDER.parent
BACKENDS = tuple(sorted(path.suffix.removeprefix(".") for path in ROOT.glob("Dockerfile.*")))
"""Those that have an image."""
TOOLS = ("docker", "podman", "buildah")


def tool(wanted: str | None = None) -> str:
    """The first tool that can really build here; a docker client without its engine cannot."""
    for name in [wanted] if wanted else TOOLS:
        if shutil.which(name) is None:
            continue
        if name != "docker" or _succeeds(["docker", "info"]):
            return name
    raise BuildError(
        f"{wanted or 'None of docker (with its engine running), podman and buildah'} is not usable "
        "here. Install one: 'apt-get install podman' on Debian and Ubuntu."
    )


def command(
    with_tool: str, backend: str, tag: str, arguments: dict[str, str], extra: Sequence[str] = ()
) -> list[str]:
    """The build's command line; `extra` is passed to the tool unchanged."""
    # The OCI format has no HEALTHCHECK, so podman and buildah would drop it with a warning.
    docker_format = [] if with_tool == "docker" else ["--format", "docker"]
    values = [f"--build-arg={name}={value}" for name, value in sorted(arguments.items())]
    return [
        with_tool,
        "build",
        *docker_format,
        *values,
        *extra,
        f"--file={ROOT / f'Dockerfile.{backend}'}",
        f"--tag={tag}",
        str(ROOT),
    ]


def arguments(backend: str, pin: str | None = None, given: Sequence[str] = ()) -> dict[str, str]:
    """Base images from the pins, version and commit from the checkout; `given` NAME=VALUE
    override."""
    images = pinned.versions()["images"]
    pin = pin or backend
    if backend not in images or pin not in images:
        raise BuildError(f"There is no image for {pin}; there is one for {', '.join(images)}.")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    values = {**images[pin], "VERSION": project["version"], **_origin()}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals:
            raise BuildError(f"--build-arg {each}: NAME=VALUE is needed.")
        values[name] = value
    return values


def build(
    backend: str,
    tag: str,
    *,
    pin: str | None = None,
    with_tool: str | None = None,
    given: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> str:
    """Build the image and return its tag; the tool's own output goes to the terminal."""
    chosen = tool(with_tool)
    store.say(f"building {tag} with {chosen}")
    line = command(chosen, backend, tag, arguments(backend, pin, given), extra)
    if subprocess.run(line).returncode != 0:
        raise BuildError(f"{chosen} could not build {tag}; its own words are above.")
    return tag


def _origin() -> dict[str, str]:
    """The checkout's origin, its commit and the commit's date, as far as git knows them."""
    source = _git("remote", "get-url", "origin")
    parts = urlsplit(source)
    if parts.hostname:  # without a name and a password before the host
        port = f":{parts.port}" if parts.port else ""
        source = urlunsplit((parts.scheme, parts.hostname + port, parts.path, "", ""))
    found = {
        "SOURCE": source,
        "REVISION": _git("rev-parse", "HEAD"),
        "CREATED": _git("log", "-1", "--format=%cI"),
    }
    return {name: value for name, value in found.items() if value}


def _git(*arguments: str) -> str:
    if shutil.which("git") is None or not Path(ROOT, ".git").exists():
        return ""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _succeeds(line: list[str]) -> bool:
    return subprocess.run(line, capture_output=True).returncode == 0
