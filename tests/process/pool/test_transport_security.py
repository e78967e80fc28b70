"""Connections to the manager: TLS is verified, proxies of the environment are honoured."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import StartWorker
from tests.support.certificate import own_certificate
from tests.support.pool_manager import PoolManager, serving
from worker.observability.metrics import Metrics
from worker.pool.client import PoolClient
from worker.pool.conformance import send_json
from worker.settings import Settings


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A manager's self-signed certificate."""
    return own_certificate(tmp_path)


@contextmanager
def serving_tls(certificate: Path) -> Iterator[PoolManager]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serving(tls=context) as manager:
        yield manager


@pytest.fixture(autouse=True)
def no_proxy_but_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def certificates_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the tests of a session share a certificate store, whatever the environment."""
    plain = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", getattr(plain, "__wrapped__", plain))


async def sent(url: str) -> tuple[int | None, str]:
    """Return the outcome of one message to a manager, sent by the worker's own client."""
    client = PoolClient(Settings(), Metrics("w"))
    try:
        return await client.post(url, {"worker_id": "w"}, 60.0)
    finally:
        await client.close()


@pytest.mark.anyio
async def test_an_untrusted_certificate_is_refused(certificate: Path) -> None:
    with serving_tls(certificate) as manager:
        url = manager.url.replace("http:", "https:") + "/ready"
        status, trouble = await sent(url)
        assert status is None and "CERTIFICATE_VERIFY_FAILED" in trouble
        assert manager.callbacks == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    "variables",
    [{"ALL_PROXY": "nothing://127.0.0.1:1"}, {"SSL_CERT_FILE": "/there/is/no/such.pem"}],
    ids=["a proxy of no kind", "certificates that are not there"],
)
async def test_an_unusable_variable_of_the_environment_is_named(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status, trouble = await sent("http://127.0.0.1:1/ready")
    assert status is None and all(name in trouble for name in variables)


def test_certificates_and_proxies_of_the_environment_are_used(
    start_worker: StartWorker, certificate: Path
) -> None:
    """In a whole worker, whose environment reaches its client."""
    forwarded: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            forwarded.append(self.path)
            send_json(self, 200, {})

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with serving_tls(certificate) as manager, ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{proxy.server_address[1]}"
        beats = manager.url.replace("http:", "https:") + "/heartbeat"
        running = start_worker(
            *("--callback-url", "http://manager.invalid/ready", "--heartbeat-url", beats),
            env={"HTTP_PROXY": address, "SSL_CERT_FILE": str(certificate)},
        )
        running.wait_log("callback.accepted")
        manager.wait_for(n_beats=1)
        assert running.logs("heartbeat.failed") == []
        proxy.shutdown()
        thread.join(10)
    assert forwarded == ["http://manager.invalid/ready"]
