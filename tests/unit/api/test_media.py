"""Media of a request: by URL, only from allowed hosts, and in base64."""

from __future__ import annotations

import asyncio
import base64
import tracemalloc
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.api.chat import links
from worker.api.chat.chat_fields import PartFields, content_of
from worker.api.chat.media import Link, medium_of
from worker.errors import ConfigError, InvalidRequest
from worker.settings import Settings

PUBLIC = "93.184.215.14"
ANY = [("*", None)]


def sent(status: int = 200, data: bytes = b"x", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, headers=named, stream=httpx.ByteStream(data))


def got(
    url: str,
    known: Sequence[tuple[str, int | None]] = ANY,
    answer: Callable[[httpx.Request], httpx.Response] = lambda _: sent(),
    most: int = 100,
) -> bytes:
    async def get() -> bytes:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await links._get(client, url, known, most)

    return asyncio.run(get())


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The resolved names, which all have the same public address."""
    hosts: list[str] = []

    async def resolved(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        hosts.append(host)
        return [(0, 0, 0, "", (PUBLIC, port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolved)
    return hosts


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "127.1", "0x7f.1", "2130706433", "0.0.0.0", "10.0.0.1"),
        *("172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "224.0.0.1"),
        *("[::1]", "[::]", "[::ffff:127.0.0.1]", "[fd00::1]", "[fe80::1]", "[64:ff9b::7f00:1]"),
        *("[2002:7f00:1::1]", "[ff02::1]", "255.255.255.255"),
    ],
)
def test_no_address_of_a_private_network_is_connected_to(host: str) -> None:
    def connected(request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"connected to {request.url}")

    with pytest.raises(links._Refused, match="private network|there is no host"):
        got(f"http://{host}/x.png", answer=connected)


def test_a_private_address_that_is_allowed_is_fetched_from() -> None:
    assert got("http://127.0.0.1:81/x", [("127.0.0.1", 81)]) == b"x"
    assert got("http://localhost/x", [("localhost", None), ("127.0.0.1", None)]) == b"x"
    with pytest.raises(links._Refused, match="port 80"):
        got("http://127.0.0.1/x", [("127.0.0.1", 81)])
    with pytest.raises(links._Refused, match="private network"):
        got("http://localhost/x", [("localhost", None), ("127.0.0.1", 81)])


@given(st.ip_addresses(v=4))
def test_an_address_inside_another_is_judged_as_itself(address: IPv4Address) -> None:
    inside = int(address)
    for whole in ((0xFFFF << 32) | inside, (0x64FF9B << 96) | inside):
        assert links.is_public(IPv6Address(whole)) == links.is_public(address)
    if not links.is_public(address):
        assert not links.is_public(IPv6Address((0x2002 << 112) | (inside << 80) | 1))


def test_the_address_that_was_checked_is_connected_to_under_the_hosts_name(
    names: list[str],
) -> None:
    """A second lookup could return another one."""

    def connected(request: httpx.Request) -> httpx.Response:
        assert request.url.host == PUBLIC
        assert request.headers["host"] == "Pictures.example:8443".lower()
        assert request.extensions["sni_hostname"] == "pictures.example"
        return sent()

    url = "https://Pictures.example.:8443/x.png"
    assert got(url.replace(".:", ":"), [("pictures.example", 8443)], connected) == b"x"
    assert names == ["pictures.example"]


def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def resolved(*_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, 80)) for address in ("93.184.215.15", PUBLIC)]

    def connected(request: httpx.Request) -> httpx.Response:
        if request.url.host == PUBLIC:
            return sent()
        assert 0 < request.extensions["timeout"]["connect"] < links.SECONDS / 2
        raise httpx.ConnectTimeout("", request=request)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolved)
    assert got("http://pictures.example/x.png", answer=connected) == b"x"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("http://127.0.0.1/", "private network|names it"),
        ("http://other.example/", "names it"),
        ("file:///etc/passwd", "only data:"),
        ("gopher://pictures.example/", "only data:"),
        ("//me:key@pictures.example/", "user's name"),
        ("http://pictures.example:22/", "port 22"),
        ("/again", "redirects more than"),
    ],
)
def test_a_redirect_is_checked_as_the_first_url_is(
    names: list[str], target: str, words: str
) -> None:
    moved = httpx.Response(302, headers={"location": target})
    with pytest.raises(links._Refused, match=words):
        got("http://pictures.example/", [("pictures.example", None)], lambda _: moved)


def test_a_redirect_to_a_named_host_is_followed(names: list[str]) -> None:
    """Without the first one's cookies, although both hosts have the same address."""

    def answer(request: httpx.Request) -> httpx.Response:
        assert "cookie" not in request.headers
        if request.headers["host"] == "a.example":
            return sent(301, location="https://b.example/x", set_cookie="user=a")
        return sent(data=b"b")

    assert got("http://a.example/", [("a.example", None), ("b.example", None)], answer) == b"b"
    assert names == ["a.example", "b.example"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (sent(data=bytes(101)), "too large"),
        (sent(404), "answered 404"),
        (sent(data=b""), "sends nothing"),
        (sent(content_encoding="br"), "compressed"),
    ],
)
def test_unusable_answers_of_a_host_are_refused(
    names: list[str], answer: httpx.Response, words: str
) -> None:
    with pytest.raises(links._Refused, match=words):
        got("http://pictures.example/", answer=lambda _: answer)


@pytest.mark.parametrize("host", ["a/b", "http://a", "a:x", "a:99999", "u@a", "::1"])
def test_an_invalid_media_host_is_a_config_error(host: str) -> None:
    with pytest.raises(ConfigError, match="HOST or HOST:PORT"):
        Settings.load("cpu", {"allow_media_host": [host]})


def test_hosts_are_names_or_addresses_with_or_without_a_port() -> None:
    hosts = ["Pictures.example", "10.0.0.5:81", "[fd00::1]:81", "[::1]", "*"]
    assert Settings.load("cpu", {"allow_media_host": hosts}).media_hosts == (
        *(("pictures.example", None), ("10.0.0.5", 81), ("fd00::1", 81), ("::1", None)),
        ("*", None),
    )


def test_blanks_in_base64_cost_no_memory() -> None:
    data = bytes(range(256)) * 1024
    text = " ".join(base64.b64encode(data).decode()) + "\r\n\t"
    tracemalloc.start()
    assert medium_of("image", text, "picture").data == data
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * len(text)


SOUND = base64.b64encode(b"RIFF").decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": SOUND}},
        {"type": "image_url", "image_url": SOUND},
        {"type": "input_audio", "input_audio": {"data": SOUND}},
        {"type": "input_audio", "input_audio": {"url": SOUND}},
        {"type": "input_audio", "input_audio": {"url": f"data:audio/wav;base64,{SOUND}"}},
        {"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{SOUND}"}},
        {"type": "input_audio", "input_audio": {"url": "http://a.example/b"}},
    ],
)
def test_a_medium_is_base64_or_a_url_in_each_field(part: dict[str, Any]) -> None:
    (found,) = content_of((PartFields.model_validate(part),), "content") or ()
    assert not isinstance(found, str) and found.kind == part["type"].split("_")[-1].replace(
        "url", "image"
    )
    assert found.data == b"RIFF" or (isinstance(found, Link) and found.url == "http://a.example/b")


@pytest.mark.parametrize("text", ["QQ", "Q\u2003Q==", "QQ==\u00e9", "Q=Q=", "===="])
def test_invalid_base64_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="must be base64"):
        medium_of("image", text, "picture")
