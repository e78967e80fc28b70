"""Access: keys, and the host names of a worker."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.api.http.gate import Gate
from worker.errors import ConfigError, Forbidden, Unauthorized
from worker.setting_files import read_keys
from worker.settings import Settings

ADDRESSES = ["10.0.0.7", "192.168.1.2:8080", "[fd00::1]:8080", "127.0.0.1", "0.0.0.0:8080"]
PRIVATE = ["worker", "llm:8080", "llm.local", "a.b.internal", "w.ns.svc", "w.ns.svc.cluster.local"]
PUBLIC = [
    "evil.example",
    "127.0.0.1.nip.io",
    "a.local.evil.com",
    "10.0.0.7.evil.com.",
    "x.localhost.io",
]
LABEL = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=20)


HOST = (b"host", b"127.0.0.1")
OPEN = Gate(Settings(host=("0.0.0.0",)))


def may_ask(settings: Settings, **head: str) -> bool:
    return lets_in(Gate(settings), **head)


def lets_in(gate: Gate, **head: str) -> bool:
    given_head = {"host": "127.0.0.1", "content-type": "application/json"} | head
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in given_head.items()]
    scope: Any = {"method": "POST", "http_version": "1.1", "headers": raw}
    try:
        gate.check(None, scope)
    except (Forbidden, Unauthorized):
        return False
    return True


@pytest.mark.parametrize("host", ADDRESSES + PRIVATE)
def test_without_a_token_private_names_and_addresses_are_accepted(host: str) -> None:
    assert lets_in(OPEN, host=host)


@pytest.mark.parametrize("host", PUBLIC)
def test_a_public_name_is_refused_against_dns_rebinding(host: str) -> None:
    """For a browser, its page has the same origin as the worker."""
    own = {"host": host, "origin": f"http://{host}"}
    assert not lets_in(OPEN, **own)
    assert may_ask(Settings(host=("0.0.0.0",), allow_host=(host.rstrip("."),)), **own)


@given(
    labels=st.lists(LABEL, min_size=2, max_size=5), end=st.sampled_from(["com", "io", "dev", "net"])
)
def test_no_name_under_a_public_suffix_is_accepted(labels: list[str], end: str) -> None:
    host = ".".join([*labels, end])
    assert not lets_in(OPEN, host=host) or host == socket.gethostname()


def test_the_operators_own_names_are_accepted() -> None:
    assert may_ask(Settings(host=("0.0.0.0",)), host=socket.gethostname())
    assert may_ask(Settings(host=("llm.example.com",)), host="llm.example.com:8080")
    assert may_ask(
        Settings(host=("0.0.0.0",), advertise_host="w.example.com"), host="w.example.com"
    )


def test_of_several_addresses_the_most_open_one_counts() -> None:
    assert not may_ask(Settings(host=("127.0.0.1", "::1")), host="worker")
    assert may_ask(Settings(host=("127.0.0.1", "10.0.0.7")), host="worker")


def test_on_loopback_only_loopback_names_are_accepted() -> None:
    for host in ["10.0.0.7", "worker", "llm.local", *PUBLIC]:
        assert not may_ask(Settings(), host=host)
        assert not may_ask(Settings(worker_token="t"), host=host, authorization="Bearer t")


def test_with_a_token_or_a_unix_socket_any_name_is_accepted() -> None:
    settings = Settings(host=("0.0.0.0",), worker_token="t")
    assert may_ask(settings, host="evil.example", authorization="Bearer t")
    assert not may_ask(settings, host="evil.example")
    assert may_ask(Settings(uds="/run/w.sock"), host="anything.example")


def test_each_key_has_its_name(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalice:sk-a\n\n  bob : sk:b \nsk-c\n")
    assert read_keys(str(file)) == {"sk-a": "alice", "sk:b": "bob", "sk-c": "line-5"}
    gate = Gate(Settings(api_key_file=str(file), worker_token="t"))
    scope: Any = {"method": "GET", "http_version": "1.1"}
    for key, name in [("sk-a", "alice"), ("sk:b", "bob"), ("sk-c", "line-5"), ("t", "token")]:
        scope["headers"] = [HOST, (b"authorization", b"Bearer " + key.encode())]
        assert gate.check(None, scope) == name
    for wrong in (b"alice", b"alice:sk-a", b"sk-", b"", b"# ours"):
        scope["headers"] = [HOST, (b"x-api-key", wrong)]
        with pytest.raises(Unauthorized):
            gate.check(None, scope)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no key"),
        ("a:SECRET\na:OTHER", "line 2: its name or its key is already used above"),
        ("a:SECRET\nb:SECRET", "line 2: its name or its key is already used above"),
        ("a b:SECRET", "line 1: it must be NAME:KEY"),
        ("a:SEC RET", "line 1: it must be NAME:KEY"),
        ("a:", "line 1: it must be NAME:KEY"),
    ],
)
def test_errors_of_a_key_file_contain_no_key(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why) as refused:
        read_keys(str(file))
    assert "SEC" not in refused.value.message
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "none"))
