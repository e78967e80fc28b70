"""Turns recorded HTTP streams into token times. Pure functions over bytes; no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.bench.client import Recording
from tools.bench.errors import BenchError


@dataclass(frozen=True, slots=True)
class TokenStream:
    """When each piece of text arrived, on the client's clock, and what the server counted."""

    sent_s: float
    token_times_s: tuple[float, ...]
    text: str
    finish_reason: str | None
    n_tokens: int | None
    n_prompt: int = 0
    n_cached: int = 0
    """Prompt tokens that were reused from a cache, if the server reports them."""

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.token_times_s[-1] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        times = self.token_times_s
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


def body_pieces(recording: Recording) -> Iterator[tuple[float, bytes]]:
    """Strip the HTTP head and the chunk framing; yield body bytes with their arrival times."""
    times = iter(recording.pieces)
    at, head = 0.0, b""
    while b"\r\n\r\n" not in head:
        piece = next(times, None)
        if piece is None:
            break
        at = piece[0]
        head += piece[1]
    head, _, body = head.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    status = lines[0].split(" ", 2)
    if len(status) < 2 or status[1] != "200":
        rest = body + b"".join(data for _, data in times)
        raise BenchError(f"The server answered {lines[0]!r}: {rest[:300].decode(errors='replace')}")
    if any(line.lower().replace(" ", "") == "transfer-encoding:chunked" for line in lines):
        yield from _dechunk(at, body, times)
        return
    yield at, body
    yield from times


def _dechunk(
    at: float, buffer: bytes, times: Iterator[tuple[float, bytes]]
) -> Iterator[tuple[float, bytes]]:
    while True:
        size_line, mark, rest = buffer.partition(b"\r\n")
        if mark:
            size = int(size_line.split(b";")[0], 16)
            if size == 0:
                return
            if len(rest) >= size + 2:
                yield at, rest[:size]
                buffer = rest[size + 2 :]
                continue
        piece = next(times, None)
        if piece is None:
            return
        at = piece[0]
        buffer += piece[1]


def events(recording: Recording) -> Iterator[tuple[float, str, str]]:
    """Yield (arrival time, event name, data) of each complete server-sent event."""
    buffer = b""
    for at, data in body_pieces(recording):
        buffer = (buffer + data).replace(b"\r\n", b"\n")
        *blocks, buffer = buffer.split(b"\n\n")
        for block in blocks:
            name, values = "message", []
            for line in block.decode().split("\n"):
                key, _, value = line.partition(":")
                if key == "event":
                    name = value.strip()
                elif key == "data":
                    values.append(value.removeprefix(" "))
            if values:
                yield at, name, "\n".join(values)


def token_stream(recording: Recording) -> TokenStream:
    """Read an OpenAI completion stream or an `/execute` stream, which the events distinguish."""
    arrivals: list[float] = []
    texts: list[str] = []
    finish: str | None = None
    n_tokens: int | None = None
    n_prompt = n_cached = 0
    for at, _name, data in events(recording):
        if data == "[DONE]":
            continue
        message: dict[str, Any] = json.loads(data)
        kind = message.get("type")
        if kind == "error" or "error" in message:
            raise BenchError(f"A stream ended with an error: {data[:300]}")
        text = message.get("t", "") if kind == "token" else ""
        if kind == "end":
            finish, n_tokens = message.get("stop_reason"), message.get("tokens_out")
        for choice in message.get("choices") or ():
            delta = choice.get("delta") or {}
            text += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                text += call.get("function", {}).get("arguments") or ""
            finish = choice.get("finish_reason") or finish
        usage = message.get("usage")
        if usage:
            n_tokens = usage.get("completion_tokens", n_tokens)
            n_prompt = usage.get("prompt_tokens", n_prompt)
            n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", n_cached)
        if text:
            arrivals.append(at)
            texts.append(text)
    if not arrivals:
        raise BenchError("A stream ended without any token.")
    text, times = "".join(texts), tuple(arrivals)
    return TokenStream(recording.sent_s, times, text, finish, n_tokens, n_prompt, n_cached)
