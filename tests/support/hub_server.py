"""A local server that speaks the hub's protocol: metadata, redirects, ranges, listings, faults.

Two origins, as in reality: the hub itself, which answers HEAD and redirects to large files, and a
storage host that must never get the user's token. Each runs in a thread of the test process.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

COMMIT = "a" * 40
OTHER_COMMIT = "b" * 40
TOKEN = "hf_secretTokenOfTheTest"


@dataclass
class Repo:
    """Files by name, at each commit; small ones are served by the hub itself."""

    files: dict[str, bytes]
    branches: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    gated: bool = False
    private: bool = False


@dataclass
class Hub:
    """The state of both servers; tests change it while they run."""

    repos: dict[str, Repo] = field(default_factory=dict)
    large_bytes: int = 1024
    """Files at least this large are kept by the storage host and named by their SHA-256."""
    fail_with: tuple[int, dict[str, str]] | None = None
    fail_times: int = 10**6
    cut_after_bytes: int | None = None
    """Break the connection after this many bytes of a body, `cut_times` times."""
    cut_times: int = 0
    ignore_ranges: bool = False
    storage_fails: bool = False
    listing: bytes | None = None
    """Replaces the body of each listing."""
    lie_about: dict[str, str] = field(default_factory=dict)
    """File name → a wrong ETag."""
    size: str | None = None
    """Replaces the reported size of each large file."""
    stored_instead: dict[str, bytes] = field(default_factory=dict)
    """File name → the storage's content, if it differs from what the hub announces."""
    chunk_delay_seconds: float = 0.0
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """(method, path, headers) of the requests to both origins, in order."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""
    storage_url: str = ""

    def etag(self, name: str, content: bytes) -> str:
        if name in self.lie_about:
            return self.lie_about[name]
        if len(content) >= self.large_bytes:
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def bodies(self, method: str = "GET") -> list[tuple[str, dict[str, str]]]:
        """Return the requests for file contents, without listings."""
        return [
            (path, headers)
            for verb, path, headers in self.requests
            if verb == method and not path.startswith("/api/")
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    is_storage: bool
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        hub = self.hub
        headers = {key.lower(): value for key, value in self.headers.items()}
        with hub.lock:
            hub.requests.append((self.command, self.path, headers))
            if hub.fail_with is not None and hub.fail_times > 0:
                hub.fail_times -= 1
                status, extra = hub.fail_with
                self.reply(status, extra)
                return
        if self.is_storage and hub.storage_fails:
            self.reply(503, {})
        elif self.is_storage:
            self.serve_blob(self.path.split("?")[0].removeprefix("/blobs/"))
        elif self.path.startswith("/api/models/"):
            self.serve_listing()
        else:
            self.serve_resolve(with_body)

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if body and self.command != "HEAD":
            self.send_body(body)

    def find(self, repo_id: str, revision: str) -> tuple[Repo, str] | None:
        """Return the repository and commit, or `None` after sending an error."""
        repo = self.hub.repos.get(repo_id)
        allowed = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not allowed):
            self.reply(401, {"X-Error-Code": "RepoNotFound"} if allowed else {})
            return None
        if repo.gated and not allowed:
            self.reply(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
            return None
        commit = repo.branches.get(revision, revision)
        if commit not in repo.branches.values():
            self.reply(404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return repo, commit

    def serve_listing(self) -> None:
        repo_id, _, revision = (
            self.path.split("?")[0].removeprefix("/api/models/").partition("/revision/")
        )
        found = self.find(repo_id, unquote(revision) or "main")
        if found is None:
            return
        repo, commit = found
        siblings = [{"rfilename": name, "size": len(data)} for name, data in repo.files.items()]
        body = json.dumps({"id": repo_id, "sha": commit, "siblings": siblings}).encode()
        self.reply(200, {"Content-Type": "application/json"}, self.hub.listing or body)

    def serve_resolve(self, with_body: bool) -> None:
        repo_id, _, rest = self.path.split("?")[0].lstrip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        name = unquote(name)
        found = self.find(repo_id, unquote(revision))
        if found is None:
            return
        repo, commit = found
        content = repo.files.get(name)
        if content is None:
            self.reply(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        etag = self.hub.etag(name, content)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}
        if len(content) >= self.hub.large_bytes:
            headers |= {
                "X-Linked-Size": self.hub.size or str(len(content)),
                "X-Linked-Etag": f'"{etag}"',
                "Location": f"{self.hub.storage_url}/blobs/{repo_id}/{name}?signature=xyz",
            }
            self.reply(302, headers)
        elif with_body:
            self.serve_bytes(content, headers)
        else:
            self.reply(200, {**headers, "Content-Length": str(len(content))})

    def serve_blob(self, rest: str) -> None:
        owner, name, file = rest.split("/", 2)
        file = unquote(file)
        content = self.hub.repos[f"{owner}/{name}"].files[file]
        self.serve_bytes(self.hub.stored_instead.get(file, content), {})

    def serve_bytes(self, content: bytes, headers: dict[str, str]) -> None:
        wanted = self.headers.get("range")
        if wanted is None or self.hub.ignore_ranges:
            self.reply(200, headers, content)
            return
        start = int(wanted.removeprefix("bytes=").partition("-")[0])
        if start >= len(content):
            self.reply(416, {"Content-Range": f"bytes */{len(content)}"})
            return
        part = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        self.reply(206, {**headers, **part}, content[start:])

    def send_body(self, body: bytes) -> None:
        hub = self.hub
        with hub.lock:
            cut = hub.cut_after_bytes if hub.cut_times > 0 and len(body) >= 1024 else None
            if cut is not None:
                hub.cut_times -= 1
        step = 2**20
        end = len(body) if cut is None else min(cut, len(body))
        for start in range(0, end, step):
            self.wfile.write(body[start : min(start + step, end)])
            if hub.chunk_delay_seconds:
                threading.Event().wait(hub.chunk_delay_seconds)
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect within a body, which is part of the tests."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run both origins until the block ends. `localhost` and `127.0.0.1` count as two hosts."""
    hub = Hub()
    servers = []
    for is_storage in (False, True):
        handler = type("Handler", (_Handler,), {"hub": hub, "is_storage": is_storage})
        server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
    hub.url = f"http://127.0.0.1:{servers[0].server_port}"
    hub.storage_url = f"http://localhost:{servers[1].server_port}"
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
