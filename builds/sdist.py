"""The pinned sdist: fetched once, verified every time, and unpacked for those who read its
sources."""

import re
import shutil
import tarfile
import tempfile
from pathlib import Path

from builds import store, toolchain
from builds.errors import BuildError
from builds.pins import Pins

CONVERTER = re.compile(
    r"vendor/llama\.cpp/(convert_hf_to_gguf\.py|conversion/\w+\.py|LICENSE"
    r"|gguf-py/(LICENSE|gguf/\w+\.py))"
)
"""llama.cpp's own converter, in the sources."""
COMMIT_FILE = ".git/modules/vendor/llama.cpp/HEAD"


def fetch(pins: Pins, given: Path | None = None) -> Path:
    """The verified archive: the given file, else the cached one, else a new download."""
    if given is not None:
        if not given.is_file():
            raise BuildError(f"--sdist {given}: there is no such file.")
        _verify(given, pins)
        return given
    archive = store.folder("sdist") / pins.sdist_name
    with store.lock(f"sdist-{pins.version}"):
        if not archive.exists():
            store.say(f"downloading the llama-cpp-python {pins.version} sources (77 MB)")
            _download(archive, pins)
        _verify(archive, pins)
    return archive


def unpacked(pins: Pins, given: Path | None = None) -> Path:
    """The sources in the cache, to read only (vocabularies, llama-server); never built in place."""
    home = store.folder("sdist") / f"{pins.version}-{pins.sdist_sha256[:16]}"
    with store.lock(f"unpack-{pins.version}"):
        if not home.exists():
            archive = fetch(pins, given)
            with store.replacing(home) as partial:
                extract(archive, partial)
    return home


def extract(
    archive: Path, target: Path, *, only: tuple[str, ...] = ("",), without: tuple[str, ...] = ()
) -> None:
    """Unpack what begins with one of `only` and none of `without` into `target`, without the
    archive's top folder."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # not in early 3.11; the archive is verified
            tar.extraction_filter = tarfile.data_filter
        for member in tar:
            _, _, member.name = member.name.partition("/")
            name = member.name
            if name and name.startswith(only) and not name.startswith(without):
                tar.extract(member, target)


def converter(archive: Path) -> dict[str, bytes]:
    """The files of llama.cpp's own converter, by their paths in llama.cpp's folder."""
    found: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            match = CONVERTER.fullmatch(member.name.partition("/")[2])
            if match is not None and (file := tar.extractfile(member)) is not None:
                found[match[1]] = file.read()
    if "convert_hf_to_gguf.py" not in found:
        raise BuildError(f"{archive} lacks llama.cpp's converter, convert_hf_to_gguf.py.")
    return found


def commit(archive: Path) -> str:
    """The llama.cpp commit of the sources."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.endswith(f"/{COMMIT_FILE}"):
                head = tar.extractfile(member)
                assert head is not None
                return head.read().decode().strip()
    raise BuildError(f"{archive} does not say which llama.cpp it holds: it has no {COMMIT_FILE}.")


def _download(archive: Path, pins: Pins) -> None:
    """Download the sdist. pip runs its code to read its metadata, but only after it has checked the
    hash."""
    python = toolchain.python(pins)
    with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
        wanted = Path(scratch, "requirements.txt")
        wanted.write_text(f"llama-cpp-python=={pins.version} --hash=sha256:{pins.sdist_sha256}\n")
        toolchain.pip(
            python,
            "download",
            "--require-hashes",
            "--no-deps",
            # The build backend that reads the metadata is the pinned one, not a fetched one.
            "--no-build-isolation",
            "--no-binary=llama-cpp-python",
            f"--dest={scratch}",
            f"--requirement={wanted}",
        )
        shutil.move(Path(scratch, pins.sdist_name), archive)


def _verify(archive: Path, pins: Pins) -> None:
    found = store.sha256(archive)
    if found != pins.sdist_sha256:
        raise BuildError(
            f"{archive} is not the pinned llama-cpp-python {pins.version} sdist: its SHA-256 is "
            f"{found}, versions.toml says {pins.sdist_sha256}. Nothing was built; remove the file "
            "to fetch it again."
        )
