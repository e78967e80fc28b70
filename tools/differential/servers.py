"""Pairs of servers that get the same requests: llama-server and the worker, with the same model.

Both compute in single precision, so that rounding decides nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx

from builds.pins import pins
from tests.support.bundled import bundled_gguf
from tests.unit.convert.test_reranker import converted, reranker
from tools.bench.peer_build import build_peers
from tools.bench.servers import (
    HOST,
    RunningServer,
    ServerKind,
    Shape,
    llama_server_kind,
    worker_kind,
)
from tools.differential import bodies
from tools.differential.asking import Answered, Asked, answered

SHAPE = Shape(slots=4, context_per_slot=1024)
PATIENCE_S = 60.0


@dataclass
class Pair:
    """Two servers with the same model, and the requests for them."""

    name: str
    model: Path
    scratch: Path
    requests: Callable[[Random], Iterator[Asked]]
    """Yields requests for each path in turn, endlessly."""
    flags: tuple[str, ...] = ()
    """Additional flags for both."""
    theirs: tuple[str, ...] = ()
    ours: tuple[str, ...] = ()
    """Additional flags for one server."""
    kv_types: tuple[str, str] = ("f32", "f32")
    """Types of keys and values."""

    def __enter__(self) -> Pair:
        peers = build_peers(pins(), jobs=2)
        k, v = self.kv_types
        # Quantised values need flash attention.
        attention = "off" if v in ("f32", "f16", "bf16") else "on"
        theirs = ["-fa", attention, "-ctk", k, "-ctv", v, "--threads", "1", "-tb", "1"]
        ours = ["--flash-attention", attention, "--kv-type-k", k, "--kv-type-v", v]
        their_kind = llama_server_kind(peers, [*theirs, *self.flags, *self.theirs])
        our_kind = worker_kind("worker", [*ours, *self.flags, *self.ours, "--threads", "1"])
        self._servers = [self._started(kind) for kind in (their_kind, our_kind)]
        self._client = httpx.Client(trust_env=False, timeout=PATIENCE_S)
        return self

    def _started(self, kind: ServerKind) -> RunningServer:
        return RunningServer(kind, self.model, SHAPE, self.scratch)

    def answers(self, asked: Asked) -> tuple[Answered, Answered]:
        """Return both servers' answers. A server that exits because of a request is restarted."""
        theirs, ours = (self._answer(index, asked) for index in range(2))
        return theirs, ours

    def _answer(self, index: int, asked: Asked) -> Answered:
        server = self._servers[index]
        try:
            return answered(self._client, f"http://{HOST}:{server.port}", asked)
        except httpx.TransportError:
            if server.process.poll() is None:
                raise
            self._servers[index] = self._started(server.kind)
            return Answered("ended", server.log_tail())

    def __exit__(self, *_error: object) -> None:
        self._client.close()
        for server in self._servers:
            server.stop()


def pairs(scratch: Path) -> Iterator[Pair]:
    model = _with_gap_tokens(scratch)
    yield Pair("generates", model, scratch, bodies.generating)
    for pooling, asked in bodies.OF_POOLING.items():
        flags = ("--pooling", pooling)
        served = _with_a_head(scratch) if pooling == "rank" else model
        yield Pair(f"pools by {pooling}", served, scratch, asked, flags, ("--embeddings",))


def _with_gap_tokens(scratch: Path) -> Path:
    """The bundled model with three of its tokens declared as fill-in-the-middle tokens."""
    path = scratch / "generates.gguf"
    names = ("fim_pre", "90"), ("fim_suf", "91"), ("fim_mid", "92")
    return _edited(path, [each for pair in names for each in ("--special-token-by-id", *pair)])


def _with_a_head(scratch: Path) -> Path:
    """A small random model whose head classifies a document as "yes" or "no"."""
    source = reranker(scratch, "Qwen3-Reranker-0.6B")
    config = source / "config.json"
    lengthened = json.loads(config.read_text()) | {"max_position_embeddings": 1024}
    config.write_text(json.dumps(lengthened))
    return converted(source)


def _edited(path: Path, flags: list[str]) -> Path:
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force", *flags]
    subprocess.run([*command, bundled_gguf("f32"), path], capture_output=True, check=True)
    return path
