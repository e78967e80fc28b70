"""Chooses a worker by a prompt's prefix, so that its prefix cache is likely to hold that prefix.

Rendezvous hashing (Thaler and Ravishankar, 1998) over the prompt's first block: each worker gets a
weight from the key and its own name, and the highest weight wins. When a worker joins or leaves,
only its own keys move. A bound on each worker's share of the load (after Mirrokni, Thorup and
Zadimoghaddam, 2018) sends requests above it to the next choice. Pure functions, for `workers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

BLOCK_CHARS = 256
"""Characters (or tokens) of a raw prompt that form its key. A chat's key is formed from its system
message and first user message, in full, which stay the same in every turn."""
SPREAD = 1.25
"""A worker whose load reaches this multiple of the mean passes its keys to the next choice."""


def key_of(body: Mapping[str, Any]) -> str | None:
    """A hash of the prompt's prefix; `None` if the body has no prompt in a known form."""
    salt = body.get("cache_salt")
    parts = [salt] if isinstance(salt, str) else []
    match body:
        case {"messages": [*messages]}:
            parts += [_text(body.get("system")), *_opening(messages)]
        case {"input": [*messages]} if body.get("instructions") or _are_messages(messages):
            parts += [_text(body.get("instructions")), *_opening(messages)]
        case {"input": str(text)}:
            parts += [_text(body.get("instructions")), text]
        case {"prompt": str(text)}:
            parts.append(text[:BLOCK_CHARS])
        case {"prompt": [int(), *_] as tokens}:
            parts.append(repr(tokens[:BLOCK_CHARS]))
        case _:
            return None
    return blake2b("\0".join(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()


def ranked(key: str, names: Iterable[str]) -> list[str]:
    """The names, best first; the order depends only on the key and the names."""
    return sorted(names, key=lambda name: _weight(key, name), reverse=True)


def bound(n_requests: int, n_workers: int) -> int:
    """The most requests for one worker if all workers have `n_requests`, including the new one."""
    return math.ceil(SPREAD * n_requests / n_workers)


def _weight(key: str, name: str) -> bytes:
    return blake2b(f"{key}\0{name}".encode(errors="surrogatepass"), digest_size=8).digest()


def _are_messages(items: list[Any]) -> bool:
    return any(isinstance(item, dict) and "role" in item for item in items)


def _opening(messages: list[Any]) -> list[str]:
    texts: list[str] = []
    for message in messages:
        if not isinstance(message, dict):
            break
        texts.append(_text(message.get("content")))
        if message.get("role") not in ("system", "developer"):
            break
    return texts


def _text(content: Any) -> str:
    """A message's text; `content` is a string or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(
            part["text"]
            for part in content
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return ""
