"""The contents of an image as a CycloneDX 1.6 document: Python, llama.cpp, npm and Debian packages.

They are read from what is really installed: the venv's metadata, the wheels' stamps and dpkg's own
list.
"""

import json
import shutil
import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from builds.errors import BuildError


def document(venv: Path) -> dict[str, Any]:
    """The document for this venv and its system; raises BuildError if there is no such venv."""
    folders = [str(path) for path in venv.glob("lib/python*/site-packages")]
    if not folders:
        raise BuildError(f"{venv} is no venv: it has no site-packages.")
    components = _python(folders) + _llama_cpp(folders) + _npm(folders) + _debian()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": sorted(components, key=lambda each: each["purl"]),
    }


def _component(
    name: str, version: str, purl: str, license_name: str | None = None
) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "library", "name": name, "version": version, "purl": purl}
    if license_name:
        found["licenses"] = [{"license": {"name": license_name}}]
    return found


def _python(folders: list[str]) -> list[dict[str, Any]]:
    found = []
    for each in distributions(path=folders):
        name, metadata = each.metadata["Name"], each.metadata
        purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{each.version}"
        stated = metadata["License-Expression"] or metadata["License"]
        found.append(_component(name, each.version, purl, stated))
    return found


def _llama_cpp(folders: list[str]) -> list[dict[str, Any]]:
    stamps = [p for folder in folders for p in Path(folder).glob("llama_cpp/lib/llorch-build.json")]
    if not stamps:
        return []
    commit = json.loads(stamps[0].read_text())["llama_cpp_commit"]
    return [_component("llama.cpp", commit, f"pkg:github/ggml-org/llama.cpp@{commit}", "MIT")]


def _npm(folders: list[str]) -> list[dict[str, Any]]:
    """What went into the chat page."""
    lists = [p for folder in folders for p in Path(folder).glob("llorch_chat/packages.json")]
    packages = [each for listed in lists for each in json.loads(listed.read_text())]
    return [
        _component(each["name"], each["version"], _npm_purl(each), each["license"])
        for each in packages
    ]


def _npm_purl(package: dict[str, str]) -> str:
    return f"pkg:npm/{package['name'].replace('@', '%40')}@{package['version']}"


def _debian() -> list[dict[str, Any]]:
    if shutil.which("dpkg-query") is None:
        return []
    command = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${Architecture}\\n"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = []
    for line in shown.splitlines():
        name, version, architecture = line.split()
        found.append(_component(name, version, f"pkg:deb/{name}@{version}?arch={architecture}"))
    return found
