"""Base64 of a medium: what is taken, and what it costs."""

from __future__ import annotations

import base64
import tracemalloc

import pytest

from worker.api.chat.media import medium_of
from worker.errors import InvalidRequest


def test_blanks_in_base64_cost_no_memory() -> None:
    data = bytes(range(256)) * 1024
    text = " ".join(base64.b64encode(data).decode()) + "\r\n\t"
    tracemalloc.start()
    assert medium_of("image", text, "picture").data == data
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * len(text)


@pytest.mark.parametrize("text", ["QQ", "Q\u2003Q==", "QQ==\u00e9", "Q=Q=", "===="])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="must be base64"):
        medium_of("image", text, "picture")
