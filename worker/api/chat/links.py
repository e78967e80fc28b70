"""Fetches the pictures and sounds that a request names by a URL, but only from hosts that
`--allow-media-host` names. On the event loop.

URLs are untrusted: one may name a service of this network, or a host that resolves to one, at once
or only the second time (DNS rebinding). So a name is resolved once, its addresses are checked, and
the connection goes to one that passed. A redirect is checked like the first URL. No proxy is used.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import httpx

from worker.api.chat.media import Link
from worker.api.http.faults import fault, invalid
from worker.api.http.state import AppState
from worker.errors import InvalidRequest
from worker.observability.logs import get_logger
from worker.wire.work import Medium

SECONDS = 15.0
"""The time limit for all URLs of a request."""
MAX_REDIRECTS = 5
MAX_URL_CHARS = 4096
_PORTS = {"http": 80, "https": 443}
_NAT64 = IPv6Network("64:ff9b::/96")

Address = IPv4Address | IPv6Address
AllowedHosts = Sequence[tuple[str, int | None]]
"""Hosts of `--allow-media-host` with their ports; `None` is the port of the URL's scheme."""
log = get_logger()


class _Refused(Exception):
    """Its message is a clause that says why."""


async def fetched(media: Sequence[Medium], state: AppState) -> tuple[Medium, ...]:
    """The media, with the bytes of each link among them.

    Raises:
        InvalidRequest: one of them cannot be fetched; the error names its field.
    """
    settings = state.settings
    found: dict[str, bytes] = {}
    left = state.served.max_body_bytes
    # With an explicit transport, httpx uses no proxy; it checks certificates as by default.
    transport = httpx.AsyncHTTPTransport()
    async with state.fetches, httpx.AsyncClient(transport=transport) as client:
        ends_at = asyncio.get_running_loop().time() + SECONDS
        for medium in media:
            if not isinstance(medium, Link) or medium.url in found:
                continue
            try:
                async with asyncio.timeout_at(ends_at):
                    data = await _get(client, medium.url, settings.media_hosts, left)
            except TimeoutError:
                raise _invalid(medium, f"it did not come within {SECONDS:.0f} seconds") from None
            except _Refused as error:
                raise _invalid(medium, str(error)) from None
            except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
                kind = type(error).__name__
                raise _invalid(medium, f"it could not be fetched ({kind})") from None
            left -= len(data)
            found[medium.url] = data
    return tuple(
        Medium(medium.kind, found[medium.url], medium.field) if isinstance(medium, Link) else medium
        for medium in media
    )


def _invalid(medium: Medium, why: str) -> InvalidRequest:
    return invalid([fault(medium.field, "unsupported", f"{medium.field}: {why}")])


async def _get(client: httpx.AsyncClient, text: str, hosts: AllowedHosts, most_bytes: int) -> bytes:
    if len(text) > MAX_URL_CHARS:
        raise _Refused(f"a URL may have at most {MAX_URL_CHARS} characters")
    began, url = time.monotonic(), httpx.URL(text)
    for _ in range(1 + MAX_REDIRECTS):
        response = await _sent(client, url, hosts)
        try:
            if response.has_redirect_location:
                url = url.join(response.headers["location"])
                continue
            data = await _body(response, most_bytes)
        finally:
            await response.aclose()
        seconds = round(time.monotonic() - began, 3)
        log.info("media.fetched", host=url.host, size_bytes=len(data), seconds=seconds)
        return data
    raise _Refused(f"its host redirects more than {MAX_REDIRECTS} times")


async def _sent(client: httpx.AsyncClient, url: httpx.URL, hosts: AllowedHosts) -> httpx.Response:
    """The response, its body unread, from the first address of the URL's host that connects."""
    addresses = await _addresses(url, hosts)
    # The connection goes to the address, but the certificate must be for the name.
    headers = {"host": url.netloc.decode(), "accept-encoding": "identity"}
    client.cookies.clear()  # they would go to every host at the same address
    timeout = httpx.Timeout(SECONDS, connect=SECONDS / (1 + len(addresses)))
    for address in addresses:
        request = client.build_request(
            "GET",
            url.copy_with(host=str(address)),
            headers=headers,
            timeout=timeout,
            extensions={"sni_hostname": name_of(url)},
        )
        try:
            return await client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            if address == addresses[-1]:
                raise
    raise AssertionError("there is an address")


async def _addresses(url: httpx.URL, hosts: AllowedHosts) -> list[Address]:
    """The addresses of the URL's host that may be connected to.

    Raises:
        _Refused: there is none.
    """
    scheme, name = url.scheme, name_of(url)
    if scheme not in _PORTS or not name:
        raise _Refused("only data:, http: and https: URLs are accepted")
    if url.userinfo:
        raise _Refused("a URL with a user's name is not fetched")
    port = url.port or _PORTS[scheme]
    here = {host for host, its_port in hosts if port == (its_port or _PORTS[scheme])}
    if not here & {name, "*"}:
        raise _Refused(
            f"this worker fetches nothing from port {port} of {name}, as no --allow-media-host "
            "names it; send a data: URL"
        )
    loop = asyncio.get_running_loop()
    try:
        entries = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError:
        raise _Refused(f"there is no host {name}") from None
    allowed = [
        address
        for entry in dict.fromkeys(str(each[4][0]) for each in entries)
        if is_public(address := ip_address(entry)) or entry in here
    ]
    if not allowed:
        raise _Refused(
            f"{name} is at an address of a private network or of this machine, and "
            "--allow-media-host does not name that address"
        )
    return allowed


def name_of(url: httpx.URL) -> str:
    """The name of the URL's host as resolvers and certificates have it: ASCII, in lower case."""
    return url.raw_host.decode("ascii").removesuffix(".").lower()


def is_public(address: Address) -> bool:
    """Whether an address, and an IPv4 address that it embeds, is public on the internet."""
    return all(each.is_global and not each.is_multicast for each in _with_embedded(address))


def _with_embedded(address: Address) -> Iterable[Address]:
    if isinstance(address, IPv4Address):
        return (address,)
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address in _NAT64:
        return (IPv4Address(int(address) & 0xFFFFFFFF),)
    return (address,) if address.sixtofour is None else (address, address.sixtofour)


async def _body(response: httpx.Response, most_bytes: int) -> bytes:
    if response.status_code != 200:
        raise _Refused(f"its host answered {response.status_code}")
    if (response.headers.get("content-encoding") or "identity").lower() != "identity":
        raise _Refused("its host sends it compressed")
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) > most_bytes:
            raise _Refused("it is too large: all URLs of a request share --max-body-bytes")
    if not data:
        raise _Refused("its host sends nothing")
    return bytes(data)
