"""The pages: the worker's status at `/`, the API at `/docs`, llama-server's own chat at `/chat/`.

Static files, read on first use: the chat's from the package `llorch_chat`, which `make ui` builds
and which may be missing, the others from `worker.assets.page`. The content security policies keep
pages from loading anything from elsewhere and from running anything that a model wrote.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.resources
import mimetypes
import re
from collections.abc import Iterator
from functools import cached_property
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from worker.api.http.errors import FLAT
from worker.api.http.headers import ACCEPT_ENCODING, IF_NONE_MATCH
from worker.api.http.operation import Dialect, Operation
from worker.api.http.state import AppState
from worker.errors import PathNotFound
from worker.observability.logs import digest

CHAT = "/chat"
_PATHS = {"index.html": "/", "docs.html": "/docs"}
"""Paths of the pages themselves, which are folders: their links are relative."""
NO_CHAT = "The chat page is not built; 'make ui' builds it"
_CLOSED = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_STATE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    + _CLOSED
)
# Inline scripts are permitted by hash. Formulas and diagrams have inline styles; pictures, sounds
# and PDFs are shown from memory. The page may connect to MCP servers on this machine.
_CHAT_POLICY = (
    "default-src 'none'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; media-src data: blob:; "
    "connect-src 'self' data: blob: http://localhost:* http://127.0.0.1:*; worker-src 'self' blob:;"
    " manifest-src 'self'; " + _CLOSED
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "vary": "accept-encoding",
}
_KINDS = {".js": "text/javascript", ".webmanifest": "application/manifest+json"}
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)
_NO_WEIGHT = re.compile(r"q=0(\.0*)?")
_HEAD = b'<meta charset="utf-8" />'
_DESCRIPTION = b'<meta name="description" content="Chat with the model that this worker serves" />'
"""Added to the head of the chat page, for search engines and link previews."""


def pages() -> list[Dialect]:
    """The files of all pages, which hold no secret and need no token."""
    state = [
        _served(_PATHS.get(path, f"/page/{path}"), file, _STATE_POLICY)
        for path, file in _files(importlib.resources.files("worker") / "assets" / "page")
    ]
    return [Dialect(state, FLAT), Dialect(_chat(), FLAT, api_below=CHAT)]


def has_chat() -> bool:
    return _chat_folder() is not None


def _chat_folder() -> Traversable | None:
    try:
        return importlib.resources.files("llorch_chat") / "files"
    except ModuleNotFoundError:
        return None


def _chat() -> list[Operation]:
    folder = _chat_folder()
    if folder is None:
        summary = "A page that is not built"
        return [Operation("GET", CHAT, _no_chat, summary, {}, public=True, quiet=True, asks="none")]
    return [
        _served(CHAT if path == "index.html" else f"{CHAT}/{path}", file, _CHAT_POLICY)
        for path, file in _files(folder)
    ]


def takes_gzip(accepted: str) -> bool:
    """Whether an `Accept-Encoding` header accepts gzip, with a weight above 0."""
    for each in accepted.split(","):
        name, *parameters = each.replace(" ", "").lower().split(";")
        if name == "gzip" and not any(_NO_WEIGHT.fullmatch(parameter) for parameter in parameters):
            return True
    return False


async def _no_chat(request: Request, state: AppState) -> Response:
    raise PathNotFound(NO_CHAT)


def _files(folder: Traversable, above: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{above}{entry.name}/")
        else:
            yield above + entry.name.removesuffix(".gz"), entry


class _File:
    """A file, its compressed form and its answers' headers, all made on first use."""

    def __init__(self, path: str, stored: Traversable, policy: str) -> None:
        self._path, self._stored, self._policy = path, stored, policy
        self._name = stored.name.removesuffix(".gz")
        self._is_packed = self._name != stored.name

    @cached_property
    def plain(self) -> bytes:
        data = self._stored.read_bytes()
        if self._is_packed:
            data = gzip.decompress(data)
        return data.replace(_HEAD, _HEAD + _DESCRIPTION) if self._path == CHAT else data

    @cached_property
    def small(self) -> bytes | None:
        """The file as gzip; `None` if that would not save bytes. A file that is stored compressed
        is not unpacked: for the chat's scripts, that would stall all streams for a tenth of a
        second."""
        if self._is_packed and self._path != CHAT:
            return self._stored.read_bytes()
        small = gzip.compress(self.plain, mtime=0)
        return small if len(small) < len(self.plain) else None

    @cached_property
    def kind(self) -> str:
        known = _KINDS.get(f".{self._name.rpartition('.')[2]}")
        return known or mimetypes.guess_type(self._name)[0] or "text/plain"

    @cached_property
    def tag(self) -> str:
        return digest(self.small or self.plain)[:32]

    @cached_property
    def headers(self) -> dict[str, str]:
        inline = _INLINE_SCRIPT.findall(self.plain) if self.kind == "text/html" else []
        digests = [hashlib.sha256(script).digest() for script in inline]
        scripts = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in digests)
        is_hashed = "/immutable/" in self._path  # such a name changes with the content
        return {
            **_HEADERS,
            "content-security-policy": self._policy.replace("{scripts}", scripts),
            # Other files are revalidated each time, and answered with 304 while unchanged.
            "cache-control": "max-age=31536000, immutable" if is_hashed else "no-cache",
        }

    async def answer(self, request: Request, state: AppState) -> Response:
        small = self.small if takes_gzip(ACCEPT_ENCODING.of(request) or "") else None
        headers = self.headers | {"etag": f'"{self.tag}{"" if small is None else "-gzip"}"'}
        known = (IF_NONE_MATCH.of(request) or "").split(",")
        if headers["etag"] in [tag.strip().removeprefix("W/") for tag in known]:  # a proxy's W/
            return Response(status_code=304, headers=headers)
        if small is not None:
            headers["content-encoding"] = "gzip"
        return Response(small or self.plain, headers=headers, media_type=self.kind)

    async def answer_folder(self, request: Request, state: AppState) -> Response:
        """The file as a folder's index; its links are relative, so the path must end with `/`."""
        if not request.scope["raw_path"].endswith(b"/"):
            name = request.scope["raw_path"].decode("latin-1").rpartition("/")[2]
            query = request.url.query and f"?{request.url.query}"
            return RedirectResponse(f"{name}/{query}", 308)
        return await self.answer(request, state)


def _served(path: str, stored: Traversable, policy: str) -> Operation:
    file = _File(path, stored, policy)
    answer = file.answer_folder if path in (*_PATHS.values(), CHAT) else file.answer
    return Operation("GET", path, answer, "A file of a page", {}, public=True, asks="none")
