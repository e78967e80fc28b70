"""Checks the files that settings name, before anything uses them.

Runs in both processes, so it does not import pydantic.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
import time
from pathlib import Path

from worker.errors import ConfigError, wrong_value

MAX_TEMPLATE_CHARS = 100_000
"""The most characters of a chat template; today's have a tenth of that."""
KEY_FILE, KEY_BYTES, UNFINISHED = "key", 32, ".part"
"""The name and the size of the key in `--kv-store`, and the suffix of incomplete files."""
_SOON_SECONDS = 14 * 86400
"""A certificate expires soon if less than this is left, or a third of its life if that is shorter:
some are issued for days."""
_KEY_NAME, _KEY = re.compile(r"[A-Za-z0-9._-]{1,64}"), re.compile(r"[\x21-\x7e]+")


def check_certificate(certificate: tuple[str, str]) -> str:
    """The names of both files; raises `ConfigError` unless they hold a certificate chain and its
    key, both in PEM format."""
    import ssl

    for path, field in zip(certificate, ("ssl_certfile", "ssl_keyfile"), strict=True):
        if not os.access(path, os.R_OK) or not os.path.isfile(path):
            raise wrong_value(field, path, "which is not a readable file")

    def passphrase() -> str:  # otherwise, OpenSSL asks at the terminal and waits
        raise wrong_value(
            "ssl_keyfile", certificate[1], "which is encrypted; give a key without a pass phrase"
        )

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*certificate, passphrase)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ssl-certfile {certificate[0]!r} and --ssl-keyfile {certificate[1]!r} are not "
            f"a certificate and its key: {getattr(error, 'reason', None) or error}.",
            field="ssl_certfile",
        ) from None
    return ", ".join(certificate)


def certificate_trouble(certfile: str) -> str:
    """Why clients refuse the first certificate of a file, or soon will, according to its dates and
    this machine's clock; empty if they accept it, or if Python cannot read the dates."""
    import ssl

    try:
        # Without a connection, Python parses certificates nowhere else.
        dates = ssl._ssl._test_decode_cert(certfile)  # type: ignore[attr-defined]
        begins, ends = (ssl.cert_time_to_seconds(dates[name]) for name in ("notBefore", "notAfter"))
    except (AttributeError, KeyError, OSError, ValueError):
        return ""
    now = time.time()
    if now < begins:
        return f"{certfile} is not valid before {dates['notBefore']}"
    if now >= ends:
        return f"{certfile} has expired: {dates['notAfter']}"
    if ends - now < min(_SOON_SECONDS, (ends - begins) / 3):
        return f"{certfile} expires soon: {dates['notAfter']}"
    return ""


FileVersion = tuple[int, int, tuple[int, int]] | None


def version_of(file: str | Path | int) -> FileVersion:
    """A value that changes when the file, or the file of a descriptor, changes; `None` without a
    file. Its last part identifies the file, and stays the same whatever is written to it."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    # An inode number identifies a file only within its device.
    return status.st_mtime_ns, status.st_size, (status.st_dev, status.st_ino)


def check_store(folder: Path) -> str:
    """The folder of `--kv-store`; raises `ConfigError` if an engine cannot use or create it."""
    others = stat.S_IWGRP | stat.S_IWOTH
    try:
        existing = writable_at(folder)
        status = existing.stat()
        if existing == folder and (status.st_uid != os.geteuid() or status.st_mode & others):
            why = "others can put files into it; it must belong to this user, with chmod 700"
            raise PermissionError(errno.EACCES, why)
        key = folder / KEY_FILE
        if not key.exists():
            _try_link(existing)
        elif (
            not key.is_file()  # a pipe would block
            or len(key.read_bytes()) != KEY_BYTES
            or key.stat().st_mode & 0o077
        ):
            why = f'its file "{key.name}" is damaged or open to others; remove the folder'
            raise PermissionError(errno.EACCES, why)
    except OSError as error:
        why = f"--kv-store {folder} cannot be used: {error.strerror}."
        raise ConfigError(why, field="kv_store") from None
    return str(folder)


def _try_link(folder: Path) -> None:
    """Raises `OSError` if the folder's file system has no hard links. Workers that share a store
    need them to agree on its key."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="key-", suffix=UNFINISHED) as trial:
        link = f"{trial.name}-link{UNFINISHED}"
        try:
            os.link(trial.name, link)
        except OSError as error:
            why = f"no hard link can be made in {folder}: {error.strerror}"
            raise OSError(error.errno, why) from None
        os.unlink(link)


def writable_at(folder: Path) -> Path:
    """The folder, or its nearest existing parent. Changes nothing.

    Raises:
        OSError: it cannot be written to or created; `strerror` says why.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if _is_there(path))
    mode = existing.stat().st_mode  # raises for a dangling link, which no folder can replace
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"{existing} cannot be written to")
    if existing != folder:
        try:  # Permissions are not enough: root has them in /proc and on network file systems.
            os.rmdir(tempfile.mkdtemp(dir=existing))
        except OSError as error:
            why = f"no folder can be made in {existing}: {error.strerror}"
            raise OSError(error.errno, why) from None
    return existing


def _is_there(path: Path) -> bool:
    """Raises `OSError` for a path that cannot exist."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_chat_template(file: str) -> str:
    read_chat_template(file)
    return file


def read_chat_template(file: str) -> str:
    """The text of `--chat-template`.

    Raises `ConfigError` if it is not a readable UTF-8 file, or too long.
    """
    text = _read(file, "chat_template", MAX_TEMPLATE_CHARS + 1)
    if len(text) > MAX_TEMPLATE_CHARS:
        why = f"which has more than {MAX_TEMPLATE_CHARS:,} characters"
        raise wrong_value("chat_template", file, why)
    return text


def check_keys(file: str) -> str:
    """The names of the keys; raises `ConfigError` as `read_keys`."""
    return ", ".join(read_keys(file).values())


def read_keys(path: str) -> dict[str, str]:
    """The keys of a file, each with its name. A line without a name, as in llama-server's files, is
    named by its number.

    Raises `ConfigError`, which never quotes a key.
    """
    field = "api_key_file"
    lines = _read(path, field).splitlines()
    found: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        name, key = map(str.strip, line.split(":", 1) if ":" in line else ("", line))
        name = name or f"line-{number}"
        fault = ""
        if not _KEY.fullmatch(key) or not _KEY_NAME.fullmatch(name):
            fault = (
                "it must be NAME:KEY, a name of up to 64 letters, digits, dots, - or _, and a key "
                "of visible ASCII characters"
            )
        elif key in found or name in found.values():
            fault = "its name or its key is already used above"
        if fault:
            raise ConfigError(f"--api-key-file {path!r}, line {number}: {fault}.", field=field)
        found[key] = name
    if not found:
        raise ConfigError(f"--api-key-file {path!r} has no key.", field=field)
    return found


def _read(file: str, field: str, n_chars: int = -1) -> str:
    """The first `n_chars` characters of the file that a setting names; -1 reads all.

    Raises `ConfigError` if it is not a readable UTF-8 file.
    """
    try:
        path = os.path.expanduser(file)
        # A pipe would block, and a device could be endless.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(0, "it is not a file")
        with open(path, encoding="utf-8") as opened:
            return opened.read(n_chars)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise wrong_value(field, file, f"which cannot be read: {why}") from None
