"""A small MCP server over streamable HTTP, with one tool, for the chat page to call."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOL = {
    "name": "weather",
    "description": "The weather in a city",
    "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@contextmanager
def running_mcp(text: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run the server; yields its address and the arguments of each tool call, which returns
    `said`."""
    calls: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_OPTIONS(self) -> None:
            self._answer(204, b"")

        def do_GET(self) -> None:
            self._answer(405, b"")

        def do_DELETE(self) -> None:
            self._answer(200, b"")

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if "id" not in request:
                return self._answer(202, b"")
            reply = {"jsonrpc": "2.0", "id": request["id"], "result": self._result(request)}
            return self._answer(200, json.dumps(reply).encode())

        def _result(self, request: dict[str, Any]) -> dict[str, Any]:
            match request["method"]:
                case "initialize":
                    version = request["params"]["protocolVersion"]
                    return {
                        "protocolVersion": version,
                        "capabilities": {"tools": {}},
                        "serverInfo": {"name": "test", "version": "1"},
                    }
                case "tools/list":
                    return {"tools": [TOOL]}
                case "tools/call":
                    calls.append(request["params"].get("arguments", {}))
                    return {"content": [{"type": "text", "text": text}]}
                case _:
                    return {}

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("access-control-allow-origin", "*")
            self.send_header("access-control-allow-headers", "*")
            self.send_header("access-control-allow-methods", "*")
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/mcp", calls
    finally:
        server.shutdown()
        server.server_close()
