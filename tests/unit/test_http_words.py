"""The log's reasons for failed HTTP connections and for other refusals of the system."""

from __future__ import annotations

import os
import socket

import httpx
import pytest

from worker.errors import http_words, system_words


@pytest.mark.anyio
async def test_a_server_without_a_tls_handshake_is_a_connect_timeout() -> None:
    """The timeout's `__context__` is a TLS socket that had nothing to read yet."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with httpx.AsyncClient(timeout=0.3, trust_env=False) as client:
            with pytest.raises(httpx.ConnectTimeout) as caught:
                await client.get(f"https://127.0.0.1:{silent.getsockname()[1]}/")
    assert http_words(caught.value).startswith("ConnectTimeout (in the environment: ")


def test_a_header_that_cannot_be_sent_is_not_repeated() -> None:
    error = httpx.LocalProtocolError("Illegal header value b'Bearer hf_secret '")
    assert http_words(error).startswith("LocalProtocolError (in the environment: ")


def test_a_refusal_of_the_system_without_a_file_names_the_caller() -> None:
    with pytest.raises(OSError) as caught:
        os.close(-1)
    who = test_a_refusal_of_the_system_without_a_file_names_the_caller.__name__
    assert system_words(caught.value).startswith(f"Bad file descriptor ({who}, test_http_words.py")
