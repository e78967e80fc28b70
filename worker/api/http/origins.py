"""Checks of Host, Origin and content type, and CORS: which web pages may use this worker.

Any page can send requests to a local worker. Under a host name that resolves to this machine, it
could even read the answers. Browsers tell in these headers what a page does. Pure functions on
headers, before a body is read.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from worker.errors import Forbidden
from worker.settings import Settings

Headers = Sequence[tuple[bytes, bytes]]

_EXPOSED = b"x-correlation-id, x-request-id, x-ignored-fields, retry-after"


class OriginRules:
    def __init__(self, settings: Settings) -> None:
        self._checks_host = _is_loopback(settings.host)
        own = [settings.advertise_host] if settings.advertise_host else []
        self._hosts = {name.lower() for name in (*own, *settings.allow_host)}
        self._own = {name.lower() for name in own}
        self._origins = {origin.rstrip("/").lower() for origin in settings.allow_origin}
        self._needs_json = settings.worker_token is None

    def check(
        self, method: str, version: str, headers: Headers, *, always_json: bool = False
    ) -> None:
        """Check a request; with `always_json`, a POST without a body needs its content type too.

        Raises:
            Forbidden: a web page may have sent the request.
        """
        hosts = _all(headers, b"host")
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            raise Forbidden("Host must be given, once")
        host = _name_of(hosts[0]) if hosts else ""
        if self._checks_host and hosts and not (_is_loopback(host) or host in self._hosts):
            raise Forbidden(
                "Host is not a name of this worker, which listens on a loopback address; "
                "--allow-host adds one"
            )
        for origin in _all(headers, b"origin"):
            if not self._may_ask(origin.lower(), host):
                raise Forbidden(
                    "Origin is not one that may use this worker; --allow-origin adds it"
                )
        if self._needs_json and method == "POST" and not _is_json(headers):
            if always_json or _has_body(headers):
                raise Forbidden("a POST needs Content-Type: application/json")

    def cors(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """The CORS headers of an answer, if --allow-origin names the request's origin."""
        origin = next(iter(_all(headers, b"origin")), None)
        if origin is None or not self._is_named(origin.lower()):
            return []
        return [
            (b"access-control-allow-origin", origin.encode()),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]

    def preflight(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """The headers of the answer to a preflight request."""
        cors = self.cors(headers)
        if not cors:
            return []
        asked = dict(headers).get(b"access-control-request-headers", b"content-type")
        return [
            *cors,
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"access-control-allow-headers", asked),
            (b"access-control-allow-private-network", b"true"),
            (b"access-control-max-age", b"600"),
        ]

    def _may_ask(self, origin: str, host: str) -> bool:
        try:
            name = _name_of(urlsplit(origin).netloc)
        except ValueError:  # brackets that hold no address
            return False
        return bool(name) and (
            self._is_named(origin) or name == host or name in self._own or _is_address(name)
        )

    def _is_named(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins


def _all(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in headers if key == name]


def _name_of(netloc: str) -> str:
    """The host without its port and without the brackets of IPv6."""
    netloc = netloc.rpartition("@")[2].lower()
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0]
    return netloc.partition(":")[0].rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def _is_json(headers: Headers) -> bool:
    kinds = _all(headers, b"content-type")
    return len(kinds) == 1 and kinds[0].partition(";")[0].strip().lower() == "application/json"


def _has_body(headers: Headers) -> bool:
    lengths = _all(headers, b"content-length")
    return bool(_all(headers, b"transfer-encoding")) or any(length != "0" for length in lengths)
