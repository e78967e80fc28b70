"""Several addresses, and paths that all begin with a prefix."""

from __future__ import annotations

import httpx

from tests.conftest import StartWorker


def test_a_worker_listens_on_several_addresses_below_a_prefix(start_worker: StartWorker) -> None:
    flags = ("--host", "127.0.0.1,127.0.0.2", "--api-prefix", "/llm/v2")
    worker = start_worker(*flags, wait_ready=False)
    port = worker.port
    assert worker.wait_log("worker.ready")["uri"] == f"http://127.0.0.1:{port}/llm/v2"
    with httpx.Client(trust_env=False) as client:
        for host in ("127.0.0.1", "127.0.0.2"):
            at = f"http://{host}:{port}"
            assert client.get(f"{at}/llm/v2/health").status_code == 200
            assert client.get(f"{at}/llm/v2/v1/models").json()["data"]
            body = {"prompt": "Once", "max_tokens": 1}
            assert client.post(f"{at}/llm/v2/completion", json=body).json()["content"]
        for path in ("/health", "/v1/models", "/", "/llm/v22/health", "/llm"):
            assert client.get(f"{at}{path}").status_code == 404
        described = client.get(f"{at}/llm/v2/openapi.json").json()
        assert described["servers"] == [{"url": "/llm/v2"}]
        page = client.get(f"{at}/llm/v2", follow_redirects=True)
        assert page.status_code == 200 and page.url.path == "/llm/v2/"
        assert client.get(page.url.join("page/app.js")).status_code == 200
