"""What the system refuses is named with its cause: a sandbox, a limit, a port or a host."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.worker import environment
from worker.errors import ConfigError, system_failure, system_words
from worker.sockets import listen
from worker.wire.black_box import BlackBox


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.EPERM, "seccomp"),
        (errno.ENOSYS, "seccomp"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EAGAIN, "--pids-limit"),
        (errno.ENOLCK, "no file locks"),
        (errno.ENOMEM, "ulimit -v"),
    ],
)
def test_a_refused_call_is_named_with_its_likely_cause(
    number: int, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "truncate", refuse(number))
    with pytest.raises(OSError) as refused:
        BlackBox.create_file()
    assert cause in system_words(refused.value)


def of_library(path: str) -> ImportError:
    """Return NumPy's error for a library that the loader refuses."""
    try:
        raise ImportError("IMPORTANT: ...") from ImportError("libx.so: failed to map", path=path)
    except ImportError as error:
        return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "no more memory: raise ulimit -v"),
        (of_library("/lib/x.so"), "cannot be loaded: libx.so: failed to map; raise ulimit -v"),
        (RuntimeError("can't start new thread"), "no more threads"),
    ],
)
def test_what_memory_and_libraries_lack_is_no_bug(error: Exception, words: str) -> None:
    assert words in str(system_failure(error))
    assert system_failure(of_library("/worker/errors.py")) is None


@pytest.mark.parametrize("raised", ["MemoryError()", "ImportError('x', path='/lib/x.so')"])
def test_a_command_that_cannot_be_imported_says_why(raised: str, tmp_path: Path) -> None:
    (tmp_path / "a_command.py").write_text(f"raise {raised}")
    code = f"import sys; sys.path.append({str(tmp_path)!r})\n"
    code += "from worker.cli import _command; _command('a_command', 'run')"
    line = [sys.executable, "-c", code]
    ended = subprocess.run(line, env=environment(tmp_path), capture_output=True, text=True)
    assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1
    assert "raise ulimit -v" in ended.stderr


def test_a_file_is_its_own_cause() -> None:
    words = system_words(PermissionError(errno.EPERM, "Operation not permitted", "/a/file"))
    assert words == "/a/file: Operation not permitted"


@pytest.mark.parametrize(
    ("call", "port", "words"),
    [
        ("bind", 0, "--host is '127.0.0.1', which cannot be listened on"),
        ("bind", 80, "needs more privileges"),
        ("bind", 8080, "--host is '127.0.0.1', which cannot be listened on"),
        ("__init__", 0, "--host is '127.0.0.1', which cannot be listened on"),
    ],
)
def test_a_socket_that_is_refused_names_the_setting(
    call: str, port: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, call, refuse(errno.EPERM))
    with pytest.raises(ConfigError, match=words):
        listen("127.0.0.1", port)


def refuse(number: int) -> Callable[..., None]:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refused
