"""Who may ask: the bearer token, and the origin rules. It looks at a request's head alone."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import Scope

from worker.api.http.origins import OriginRules
from worker.api.http.routes import Place
from worker.errors import Unauthorized
from worker.settings import Settings

_Headers = Sequence[tuple[bytes, bytes]]


class Gate:
    def __init__(self, settings: Settings) -> None:
        origins = OriginRules(settings)
        self._origins = origins
        self.cors, self.preflight = origins.cors, origins.preflight
        token = settings.worker_token
        self._token = None if token is None else token.encode()

    def check(self, place: Place, scope: Scope) -> None:
        """
        Raises:
            Forbidden: a web page may have sent the request.
            Unauthorized: the token is missing or wrong.
        """
        method, headers = scope["method"], scope["headers"]
        operation = place.operations.get(method)
        always_json = operation is not None and operation.always_json
        self._origins.check(method, scope["http_version"], headers, always_json=always_json)
        if not place.is_public:
            self._authorise(headers)

    def _authorise(self, headers: _Headers) -> None:
        if self._token is None:
            return
        given = [value for name, value in headers if name == b"authorization"]
        tokens = [token for value in given if (token := _bearer(value)) is not None]
        tokens = tokens or [value for name, value in headers if name == b"x-api-key"]
        if len(given) > 1 or len(tokens) != 1 or not hmac.compare_digest(tokens[0], self._token):
            raise Unauthorized("this worker needs a valid bearer token (Authorization)")


def _bearer(authorization: bytes) -> bytes | None:
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None
