"""Who may use the worker: the bearer token, and the rules for web pages.

Any web page can send requests to a local worker, and under a host name that resolves to this
machine it could even read the answers. Such requests show in Host, Origin and Content-Type. Pure
functions on a request's head, called before a body is read.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.types import Scope

from worker.api.http import headers
from worker.api.http.operation import Operation
from worker.errors import Forbidden, Unauthorized, flag
from worker.observability.logs import digest
from worker.setting_files import read_keys
from worker.settings import Settings

_PRIVATE_ENDS = {"local", "internal", "localhost", "svc", "lan", "home", "corp", "test"}
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_OF_BROWSERS = (
    headers.ORIGIN, headers.REFERER, headers.SEC_FETCH_SITE, headers.SEC_FETCH_MODE, headers.COOKIE
)  # fmt: skip
"""Every recent browser sends at least one of these with a page's POST. `curl -d` sends none,
although its content type is that of a form."""
_EXPOSED = b", ".join(each.key for each in headers.ALL if each.in_answer is not None)


class Gate:
    def __init__(self, settings: Settings, spelled: Callable[[str], str] = flag) -> None:
        """`spelled` turns a setting's name into the user's spelling, for error messages."""
        self._spelled = spelled
        self._keys = _keys_of(settings)
        self._is_local = all(map(is_loopback, settings.host))
        # A page under a rebound name has no key, and no page can reach a Unix socket.
        self._checks_host = settings.uds is None and (self._is_local or not settings.needs_key)
        self._own = {settings.advertise_host.lower()} if settings.advertise_host else set()
        self._hosts = _LOOPBACK | self._own | {name.lower() for name in settings.allow_host}
        if not self._is_local:
            self._hosts |= {*map(str.lower, settings.host), socket.gethostname().lower()}
        self._origins = {origin.rstrip("/").lower() for origin in settings.allow_origin}
        self._needs_json = not settings.needs_key

    @property
    def key_names(self) -> list[str]:
        return [name for name in self._keys.values() if name is not None]

    def check(self, operation: Operation | None, scope: Scope) -> str | None:
        """Admit the request. Returns the name of the client's key, or `None` if it has none.

        `operation` is `None` if the path has none for the request's method.

        Raises:
            Forbidden: a web page may have sent the request.
            Unauthorized: the token is missing or wrong.
        """
        hosts = headers.HOST.all(scope)
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
            raise Forbidden("the Host header must be given exactly once")
        host = _name_of(hosts[0]) if hosts else ""
        if self._checks_host and hosts and host not in self._hosts:
            # If a stranger can point a host name to this machine, their page shares its origin.
            is_out_of_reach = not self._is_local and (_is_address(host) or _is_private(host))
            if not (is_out_of_reach or is_loopback(host)):
                why = "listens on a loopback address" if self._is_local else "has no token"
                raise Forbidden(
                    f"the Host header is not a name of this worker, which {why}; "
                    f"{self._spelled('allow_host')} adds one"
                )
        for origin in headers.ORIGIN.all(scope):
            if not self._may_ask(origin.lower(), host):
                setting = self._spelled("allow_origin")
                raise Forbidden(f"this Origin may not use this worker; {setting} permits it")
        values = headers.CONTENT_TYPE.all(scope)
        kinds = [value.partition(";")[0].strip().lower() for value in values]
        if self._needs_json and scope["method"] == "POST" and kinds != ["application/json"]:
            if operation is not None and operation.always_json:
                raise Forbidden(f"{operation.path} needs Content-Type: application/json")
            if _has_body(scope) and any(each.all(scope) for each in _OF_BROWSERS):
                raise Forbidden("a browser's POST needs Content-Type: application/json")
        is_public = operation is not None and (operation.public or operation.probe)
        if not self._keys or is_public:
            return None
        tokens, n_given = tokens_in(scope), len(headers.AUTHORIZATION.all(scope))
        shown = digest(tokens[0].encode("latin-1")) if n_given <= 1 and len(tokens) == 1 else ""
        if shown not in self._keys:
            how = "Authorization: Bearer … or x-api-key"
            raise Unauthorized(f"this worker requires its token or a key, as {how}")
        return self._keys[shown]

    def cors(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """The CORS headers of an answer, if --allow-origin names the request's origin."""
        for origin in headers.ORIGIN.all(scope):
            if self._is_named(origin.lower()):
                return [
                    (b"access-control-allow-origin", origin.encode("latin-1")),
                    (b"access-control-expose-headers", _EXPOSED),
                    (b"vary", b"origin"),
                ]
        return []

    def preflight(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """The headers of the answer to a CORS preflight; empty if the origin is not permitted."""
        cors = self.cors(scope)
        if not cors:
            return []
        asked = headers.ASKED_HEADERS.all(scope) or [headers.CONTENT_TYPE.name]
        return [
            *cors,
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", asked[0].encode("latin-1")),
            (b"access-control-allow-private-network", b"true"),
            (b"access-control-max-age", b"600"),
        ]

    def _may_ask(self, origin: str, host: str) -> bool:
        try:
            name = _name_of(urlsplit(origin).netloc)
        except ValueError:  # brackets without an IPv6 address
            return False
        return bool(name) and (
            self._is_named(origin) or name == host or name in self._own or _is_address(name)
        )

    def _is_named(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins


def _keys_of(settings: Settings) -> dict[str, str | None]:
    """Each key's name by the key's digest: the time of a look-up reveals nothing about a key."""
    file, token = settings.api_key_file, settings.worker_token
    keys: dict[str, str | None] = {}
    if file is not None:
        keys = {digest(key): name for key, name in read_keys(file).items()}
    if token is not None:
        keys.setdefault(digest(token), None if file is None else "token")
    return keys


def tokens_in(scope: Scope) -> list[str]:
    """The bearer tokens of a request, or else its `X-Api-Key` headers."""
    parts = [value.partition(" ") for value in headers.AUTHORIZATION.all(scope)]
    tokens = [found.strip() for scheme, _, found in parts if scheme.lower() == "bearer"]
    return tokens or headers.API_KEY.all(scope)


def _name_of(netloc: str) -> str:
    """The host without its port and without IPv6's brackets."""
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


def _is_private(name: str) -> bool:
    """Whether nobody can register the name: it has a single label, or its last label is reserved
    for private networks, such as those of Kubernetes."""
    return "." not in name or name.rpartition(".")[2] in _PRIVATE_ENDS


def is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def _has_body(scope: Scope) -> bool:
    lengths = headers.CONTENT_LENGTH.all(scope)
    return bool(headers.TRANSFER_ENCODING.all(scope)) or any(length != "0" for length in lengths)
