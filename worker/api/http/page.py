"""The page at `/`: the worker's state, and a playground for its model.

Static files of `worker/assets/page`, read once when the application is made. Their content security
policy lets the page load nothing from elsewhere and run nothing that a model wrote.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import mimetypes
from collections.abc import Iterator
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

from worker.api.http.errors import FLAT
from worker.api.http.operation import Dialect, Endpoint, Operation
from worker.api.http.state import AppState

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # revalidated each time; 304 while unchanged
}
_SERVED = (".html", ".css", ".js", ".svg")


def page() -> Dialect:
    """`/` and the files that it loads, which hold no secret and need no token."""
    folder = importlib.resources.files("worker") / "assets" / "page"
    operations = []
    for name, data in _files(folder):
        path = "/" if name == "index.html" else f"/page/{name}"
        answer = _answer_with(data, name)
        operations.append(Operation("GET", path, answer, "A file of the page", {}, public=True))
    return Dialect(operations, FLAT)


def _files(folder: Traversable, above: str = "") -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{above}{entry.name}/")
        elif entry.name.endswith(_SERVED):
            yield above + entry.name, entry.read_bytes()


def _answer_with(data: bytes, name: str) -> Endpoint:
    """An endpoint that answers with these bytes, or with 304 if the client has them."""
    kind = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0]
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = _HEADERS | {"etag": tag}

    async def answer(request: Request, state: AppState) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=kind)

    return answer
