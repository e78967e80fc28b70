"""Which worker a prompt should go to, so that what it begins with is already computed there.

Rendezvous hashing (Thaler and Ravishankar, 1998) over the prompt's first block: each worker gets a
number from the key and its own name, and the highest wins. When a worker comes or goes, only its
own keys move. A bound on each worker's part of the load (after Mirrokni, Thorup and Zadimoghaddam,
2018) sends what is too much for the first choice to the second. Pure functions; `table` has what
they are asked about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

BLOCK_CHARS = 256
"""Of a raw prompt. Of a chat, the system's and the first user's message: those stay as they are
while it goes on, whatever their length."""
SPREAD = 1.25
"""How many times the mean load one worker may have before its keys go to the next."""


def key_of(body: Mapping[str, Any]) -> str | None:
    """A hash of what a request's prompt begins with; `None` where it has none that is known."""
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
    """The names, best first; for the same key always in the same order."""
    return sorted(names, key=lambda name: _weight(key, name), reverse=True)


def bound(n_requests: int, n_workers: int) -> int:
    """Requests that one of the workers may have when all together have this many, the new one
    among them."""
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
    """A message's text, also where it comes in parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(
            part["text"]
            for part in content
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return ""
