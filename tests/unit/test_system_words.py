"""What the system refuses is named with its cause: a sandbox, a limit, a port or a host."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

import pytest

from worker.errors import ConfigError, system_words
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
