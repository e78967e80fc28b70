"""Addresses, sockets and certificates that a worker listens with."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.certificate import own_certificate
from worker.errors import ConfigError
from worker.setting_files import check_certificate
from worker.sockets import listen_at, listen_on


def test_an_invalid_certificate_is_refused_by_its_flag(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    with pytest.raises(ConfigError, match="--ssl-certfile is .*not a readable file"):
        check_certificate((str(wrong), str(wrong)))
    wrong.write_text(json.dumps("no PEM"))
    with pytest.raises(ConfigError, match="are not a certificate and its key"):
        check_certificate((str(wrong), str(wrong)))
    file = str(own_certificate(tmp_path))
    with pytest.raises(ConfigError, match="are not a certificate and its key"):
        check_certificate((file, str(wrong)))
    check_certificate((file, file))
    locked = tmp_path / "locked.pem"
    command = ["openssl", "rsa", "-aes256", "-passout", "pass:x", "-in", file, "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="--ssl-keyfile is .*is encrypted"):
        check_certificate((file, str(locked)))


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["127.0.0.1", "localhost", "127.0.0.1"], ["127.0.0.1"]),
        (["127.0.0.1", "0.0.0.0", "127.0.0.2"], ["0.0.0.0"]),
        (["127.0.0.1", "127.0.0.2"], ["127.0.0.1", "127.0.0.2"]),
    ],
)
def test_an_address_that_is_given_twice_is_listened_on_once(
    hosts: list[str], expected: list[str]
) -> None:
    listeners = listen_on(hosts, 0)
    assert [each.getsockname()[0] for each in listeners] == expected
    assert len({each.getsockname()[1] for each in listeners}) == 1
    for each in listeners:
        each.close()


@pytest.mark.anyio
async def test_an_answer_in_two_parts_is_not_delayed() -> None:
    [listener] = listen_on(["127.0.0.1"], 0)
    nodelay = list[int]()

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        nodelay.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(accepted, sock=listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        await reader.read()
        writer.close()
    assert nodelay == [1]


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.0.2", "127.0.0.1"], ["127.0.0.2", "127.0.0.1"]),
        (["192.0.2.1", "127.0.0.1"], ["127.0.0.1"]),  # nobody has the first
    ],
)
def test_a_name_is_listened_on_at_each_address_that_this_machine_has(
    addresses: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **hints: found)
    listeners = listen_on(["a-name"], 0)
    assert [each.getsockname()[0] for each in listeners] == expected
    for each in listeners:
        each.close()


def test_a_file_at_the_sockets_path_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    for path in (file, tmp_path / "none" / "w.sock"):
        with pytest.raises(ConfigError, match="^--uds is"):
            listen_at(str(path))
    assert file.read_text() == "precious"
