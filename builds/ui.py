"""The chat page as a wheel: llama-server's own, built unchanged from the pinned sources.

Node comes from its pinned package, and the page's packages from npm, by the hashes of the lock file
in the sources; none of their install scripts runs. The wheel `llorch-chat` holds the static files,
compressed where that saves bytes, and the licences and notices of all packages that went in.
"""

import gzip
import json
import re
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from builds import pins as pinned
from builds import sdist, store, toolchain
from builds.pins import Pins

NAME = "llorch-chat"
NOTICES = "NOTICES.txt"
PACKAGES = "packages.json"
_SOURCES = "vendor/llama.cpp/tools/ui"
_LEAST_SAVED = 0.1
"""A file is stored compressed if that saves this share of its bytes."""
_PACKAGE = re.compile(r"node_modules/((?:@[^/]+/)?[^/]+)/(?!.*node_modules/)")
_IMPORTED = re.compile(r"""(?:from|import)\s*\(?['"]((?:@[\w-][\w.-]*/)?[\w-][\w.-]*)""")
_LICENCE_FILE = re.compile(r"^(licen[cs]e|notice|copying)([.-].*)?$", re.IGNORECASE)
_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "{version}"
description = "llama-server's chat page (llama.cpp {commit}), for llorch-worker"
license = "{license}"
license-files = ["LICENSE", "{notices}"]
[tool.hatch.build.targets.wheel]
only-include = ["llorch_chat"]
"""


def key(pins: Pins) -> str:
    """The wheel's name in the cache: a hash of the sources, of Node and of the code here."""
    inputs = {
        "sources": pins.sdist_sha256,
        "node": pinned.versions()["node"],
        "hatchling": pins.toolchain["hatchling"],
        "code": store.code_hash(Path(__file__)),
    }
    return f"{pins.version}-{store.key(inputs)}"


def is_built(pins: Pins) -> bool:
    """Whether the wheel is in the cache."""
    return store.is_whole(store.folder("ui") / key(pins))


def build(pins: Pins, given_sdist: Path | None = None) -> Path:
    """The wheel of the page; some minutes the first time."""
    name = key(pins)
    home = store.folder("ui") / name
    with store.lock(f"ui-{name}"):
        if not store.is_whole(home):
            archive = sdist.fetch(pins, given_sdist)
            node = toolchain.node()
            with (
                store.replacing(home) as partial,
                tempfile.TemporaryDirectory(prefix="llorch-ui-") as scratch,
            ):
                work = Path(scratch).resolve()
                wheel = _build(archive, node, pins, work)
                shutil.copy2(wheel, partial / wheel.name)
                store.seal(partial)
    (wheel,) = home.glob("*.whl")
    return wheel


def _build(archive: Path, node: Path, pins: Pins, work: Path) -> Path:
    sdist.extract(archive, work / "source", only=(f"{_SOURCES}/", "vendor/llama.cpp/LICENSE"))
    source = work / "source" / _SOURCES
    version = {"LLAMA_BUILD_NUMBER": pins.llama_cpp_commit[:9]}  # the page shows it as its own
    store.say("building the chat page; some minutes, and npm fetches its packages")
    started = time.monotonic()
    toolchain.npm(node, source, "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    # The maps tell which packages went in. They are not shipped.
    toolchain.npm(node, source, "run", "build", "--", "--sourcemap", "hidden", **version)
    store.say(f"built in {time.monotonic() - started:.0f} s")
    packages = bundled(source)
    project = work / "project"
    made = project / "llorch_chat"
    _pack(source / "dist", made / "files")
    notices = notices_of(source, packages)
    (made / "files" / NOTICES).write_text(notices, "utf-8")
    listed = [{k: each.get(k) for k in ("name", "version", "license")} for each in packages]
    (made / PACKAGES).write_text(json.dumps(listed, indent=1) + "\n")
    (made / "__init__.py").write_text('"""The files of the chat page."""\n')
    (project / NOTICES).write_text(notices, "utf-8")
    shutil.copy2(work / "source/vendor/llama.cpp/LICENSE", project / "LICENSE")
    licenses = sorted({"MIT", *(each["license"] for each in packages if each.get("license"))})
    (project / "pyproject.toml").write_text(
        _PROJECT.format(
            name=NAME,
            version=pins.version,
            commit=pins.llama_cpp_commit[:9],
            license=" AND ".join(licenses),
            notices=NOTICES,
        )
    )
    return toolchain.packed(pins, project, work / "out")


def _pack(built: Path, target: Path) -> None:
    """Copy the page's files, each compressed if that saves bytes; maps are left out."""
    for file in sorted(built.rglob("*")):
        if not file.is_file() or file.suffix == ".map":
            continue
        place = target / file.relative_to(built)
        place.parent.mkdir(parents=True, exist_ok=True)
        data = file.read_bytes()
        small = gzip.compress(data, 9, mtime=0)
        if len(small) <= (1 - _LEAST_SAVED) * len(data):
            place.with_name(f"{place.name}.gz").write_bytes(small)
        else:
            place.write_bytes(data)


def bundled(source: Path) -> list[dict[str, Any]]:
    """The `package.json` of each package that went into the built page, sorted by name.

    Those are the packages that the maps of scripts name, and those that the page's own sources
    import, because style sheets and fonts have no map.
    """
    found = set()
    for map_file in (source / "dist").rglob("*.map"):
        for origin in json.loads(map_file.read_text("utf-8"))["sources"]:
            if match := _PACKAGE.search(urllib.parse.unquote(origin or "")):
                found.add(match[1])
    for file in (source / "src").rglob("*"):
        if file.suffix in (".css", ".scss", ".ts", ".js", ".svelte") and file.is_file():
            found |= set(_IMPORTED.findall(file.read_text("utf-8")))
    described = (source / "node_modules" / name / "package.json" for name in sorted(found))
    return [json.loads(file.read_text("utf-8")) for file in described if file.is_file()]


def notices_of(source: Path, packages: Iterable[Mapping[str, Any]]) -> str:
    """The licence and notice files of the packages, and of what lies among the page's sources."""
    parts = []
    for package in packages:
        folder = source / "node_modules" / str(package["name"])
        texts = [p for p in sorted(folder.iterdir()) if _LICENCE_FILE.match(p.name)]
        said = f"{package['name']} {package['version']} ({package.get('license', 'see below')})"
        parts += [said, *(file.read_text("utf-8", "replace").strip() for file in texts)]
    for file in sorted((source / "src").rglob("*")):
        if file.is_file() and _LICENCE_FILE.match(file.name):
            parts += [file.parent.name, file.read_text("utf-8", "replace").strip()]
    return "\n\n".join(parts) + "\n"
