"""Pictures of noise, and requests with them."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int = 0, size: tuple[int, int] = (200, 120), form: str = "PNG") -> bytes:
    width, height = size
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, form)
    return file.getvalue()


def data_url(encoded: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(encoded).decode()}"


def question(
    encoded: bytes, text: str = "and say what it is", before: str = "Look at", **more: Any
) -> dict[str, Any]:
    """The body of a chat completion about a picture."""
    content = [
        {"type": "text", "text": before},
        {"type": "image_url", "image_url": {"url": data_url(encoded)}},
        {"type": "text", "text": text},
    ]
    messages = [{"role": "user", "content": content}]
    return {"temperature": 0, "max_tokens": 24, "messages": messages, **more}
