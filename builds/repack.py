"""Turns upstream's wheel into ours: plug-ins where the worker looks, nothing astray, one stamp.

Upstream's wheel holds each library up to six times (three names, two folders) and its plug-ins in
`bin/`, which pip would unpack beside `llama_cpp`. The result depends on the inputs alone: sorted
entries, fixed timestamps.
"""

import base64
import hashlib
import json
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from builds.errors import BuildError
from builds.pins import Recipe

LIBRARIES = "llama_cpp/lib"
# Outside of the folder that is scanned for plug-ins: these are loaded only on request.
OPTIONAL = f"{LIBRARIES}/optional"
STAMP = f"{LIBRARIES}/llorch-build.json"
EARLIEST = (1980, 1, 1, 0, 0, 0)
# llama.cpp's own converter, unchanged, for models that the worker's converter does not know.
SCRIPTS = "llama_cpp/converter"
# libggml-base.so.0.25.3, libggml.0.dylib, libggml-cpu-zen4.so, libggml-cpu-armv8.2_1.so: a name,
# with a version in either place.
LIBRARY = re.compile(r"^(?P<name>lib[\w-]+?(\.\d+_\d+)?)(\.\d+)*\.(so|dylib)(\.\d+)*$")
# The bindings open these libraries by their plain names. Libraries look the others up by soname.
OPENED_BY_NAME = ("libllama", "libmtmd")
CORE = (*OPENED_BY_NAME, "libggml", "libggml-base")
# CMake adds the folders of the libraries that it linked to the run path. They are folders of the
# building machine, some of them temporary. On another machine, the owner of such a folder could
# replace what the worker loads.
RUN_PATH = "$ORIGIN"
ELF = b"\x7fELF"

Contents = dict[str, bytes]


def repack(
    upstream: Path,
    recipe: Recipe,
    stamp: Mapping[str, Any],
    licenses: Mapping[str, bytes],
    scripts: Mapping[str, bytes],
    out: Path,
    patchelf: Path,
) -> tuple[Path, list[Path]]:
    """Writes our wheel and the test plug-ins under `out`; returns both."""
    with zipfile.ZipFile(upstream) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    metadata = _one(files, "*.dist-info/METADATA")
    name, version, rest = upstream.name.split("-", 2)
    local = f"{version}+{recipe.backend}"
    kept = _python_files(files) | _core(files)
    plugins = _plugins(files)
    shipped = _pick(plugins, recipe.ship, recipe.backend)
    optional = _pick(plugins, recipe.optional, recipe.backend)
    kept |= {f"{LIBRARIES}/{plugin}": plugins[plugin] for plugin in shipped}
    kept |= {f"{OPTIONAL}/{plugin}": plugins[plugin] for plugin in optional}
    kept = _with_own_run_path(kept, patchelf)
    complete = {**stamp, "plugins": shipped, "optional_plugins": optional}
    kept[STAMP] = (json.dumps(complete, indent=2, sort_keys=True) + "\n").encode()

    info = f"{name}-{local}.dist-info"
    old = str(PurePosixPath(metadata).parent)
    for path, data in files.items():
        if path.startswith(f"{old}/") and not path.endswith("/RECORD"):
            kept[info + path.removeprefix(old)] = data
    kept |= {f"{SCRIPTS}/{path}": data for path, data in scripts.items()}
    kept |= {f"{info}/licenses/{path}": data for path, data in licenses.items()}
    kept[f"{info}/METADATA"] = _with_version(files[metadata], version, local)

    wheel = out / f"{name}-{local}-{rest}"
    _write(wheel, kept, f"{info}/RECORD")
    for_tests = {plugin: plugins[plugin] for plugin in _pick(plugins, recipe.test, recipe.backend)}
    return wheel, _beside(_with_own_run_path(for_tests, patchelf), out / "test-plugins")


def _python_files(files: Contents) -> Contents:
    return {
        path: data
        for path, data in files.items()
        if path.startswith("llama_cpp/") and not path.startswith(f"{LIBRARIES}/")
    }


def _core(files: Contents) -> Contents:
    """The core libraries, each once, under the one name by which it is looked up."""
    kept: Contents = {}
    for wanted in CORE:
        names = sorted(
            PurePosixPath(path).name
            for path in files
            if path.startswith(f"{LIBRARIES}/") and _stem(path) == wanted
        )
        if not names:
            raise BuildError(f"The compiled wheel has no {wanted} in {LIBRARIES}.")
        # By number of dots: libggml.so, libggml.so.0, libggml.so.0.25.3. Libraries look for the one
        # with only the major version, the bindings for the one without a version.
        by_dots = sorted(names, key=lambda each: each.count("."))
        index = 0 if wanted in OPENED_BY_NAME or len(by_dots) == 1 else 1
        kept[f"{LIBRARIES}/{by_dots[index]}"] = files[f"{LIBRARIES}/{by_dots[index]}"]
    return kept


def _plugins(files: Contents) -> Contents:
    """Every plug-in by its file name, wherever upstream's install put it."""
    return {
        PurePosixPath(path).name: data
        for path, data in files.items()
        if (stem := _stem(path)) and stem.startswith("libggml-") and stem not in CORE
    }


def _pick(plugins: Contents, patterns: tuple[str, ...], backend: str) -> list[str]:
    chosen: set[str] = set()
    for pattern in patterns:
        matching = {name for name in plugins if fnmatch(name, pattern)}
        if not matching:
            raise BuildError(
                f"The {backend} build made no {pattern}, which {backend}.toml wants in the wheel; "
                f"it made {', '.join(sorted(plugins)) or 'no plug-in at all'}."
            )
        chosen |= matching
    return sorted(chosen)


def _beside(plugins: Contents, folder: Path) -> list[Path]:
    if plugins:
        folder.mkdir()
    for name, data in plugins.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in plugins]


def _with_own_run_path(files: Contents, patchelf: Path) -> Contents:
    """The same files; a library looks for others in its own folder and nowhere else."""
    changed = dict(files)
    with tempfile.TemporaryDirectory(prefix="llorch-repack-") as scratch:
        library = Path(scratch, "library")
        for path in (path for path, data in files.items() if data.startswith(ELF)):
            library.write_bytes(files[path])
            if _run(patchelf, "--print-rpath", str(library)) not in ("", RUN_PATH):
                _run(patchelf, "--set-rpath", RUN_PATH, str(library))
                changed[path] = library.read_bytes()
    return changed


def _run(patchelf: Path, *arguments: str) -> str:
    done = subprocess.run([patchelf, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"patchelf {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def _with_version(metadata: bytes, version: str, local: str) -> bytes:
    before = f"\nVersion: {version}\n".encode()
    if metadata.count(before) != 1:
        raise BuildError(f"The compiled wheel's METADATA does not say 'Version: {version}' once.")
    return metadata.replace(before, f"\nVersion: {local}\n".encode())


def _write(wheel: Path, files: Contents, record: str) -> None:
    """RECORD comes last and lists everything but its own hash, as the wheel format asks."""
    lines = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for path in sorted(files):
            _add(archive, path, files[path])
            digest = base64.urlsafe_b64encode(hashlib.sha256(files[path]).digest()).rstrip(b"=")
            lines.append(f"{path},sha256={digest.decode()},{len(files[path])}\n")
        _add(archive, record, "".join([*lines, f"{record},,\n"]).encode())


def _add(archive: zipfile.ZipFile, path: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(path, EARLIEST)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.create_system = 3  # Unix, so that the mode below is used
    entry.external_attr = (0o100755 if _stem(path) else 0o100644) << 16
    archive.writestr(entry, data)


def _stem(path: str) -> str | None:
    """`libggml-base` for any of a shared library's names, None for any other file."""
    found = LIBRARY.match(PurePosixPath(path).name)
    return found["name"] if found else None


def _one(files: Contents, pattern: str) -> str:
    found = [path for path in files if fnmatch(path, pattern)]
    if len(found) != 1:
        raise BuildError(
            f"The compiled wheel holds {len(found)} files {pattern}, and one is needed."
        )
    return found[0]
