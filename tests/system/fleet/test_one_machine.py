"""A fleet that `llorch-ray up` starts on one machine: its output and its changes."""

from __future__ import annotations

import json
import re
import socket
import ssl
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.bundled import bundled_gguf
from tests.support.certificate import own_certificate
from tests.support.random_adapters import random_adapter
from tests.system.fleet.running import Running, file

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
TOKEN = "a-token-of-the-clients"
KEY = "a-key-of-one-client"
HEADERS = {"authorization": f"Bearer {TOKEN}"}


def group(name: str, more: str = "") -> str:
    return f'[[workers]]\nname = "{name}"\n{more}\n[workers.settings]\nthreads = 1\nslots = 2\n'


def rays_files(running: Running) -> list[Path]:
    """Return all files that this cluster has written."""
    lines = " ".join(" ".join(each.info["cmdline"] or []) for each in running.processes())
    (session,) = {Path(found) for found in re.findall(r"/\S*?/session_\d[^/ ]*", lines)}
    return [*session.rglob("*"), running.folder / "cache/llorch-worker/fleet/ray.log"]


def test_a_fleet_on_one_machine_is_local_authenticated_and_keeps_serving_when_an_update_fails(
    alone: Running,
) -> None:
    addresses = {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in alone.processes()
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    print(f"it listens on {addresses}")
    assert addresses == {"127.0.0.1"}

    with httpx.Client(base_url=alone.uri, timeout=60, trust_env=False) as client:
        began = time.monotonic()
        for path in ("/v1/models", "/v1/models/tiny", "/info", "/health"):
            assert client.head(path).status_code == 200
        assert time.monotonic() - began < 10
        assert all(each["well"] for each in client.get("/health").json()["workers"])

        # An additional group with an adapter, a token, and a named key.
        (alone.folder / "keys").write_text(f"ann:{KEY}\n")
        random_adapter(bundled_gguf(), alone.folder / "fox.gguf", 1)
        text = 'api_key_file = "keys"\n' + group("tiny") + group("second")
        done = alone.up(text + 'lora = "fox=fox.gguf"\n', LLORCH_WORKER_TOKEN=TOKEN)
        assert done.returncode == 0, done.stderr
        body = {"model": "second", "prompt": "Once", "max_tokens": 8, "temperature": 0}
        assert client.post("/v1/completions", json=body).status_code == 401
        answer = client.post("/v1/completions", json=body, headers=HEADERS)
        assert (answer.status_code, answer.json()["model"]) == (200, "second")
        listed = [each["id"] for each in client.get("/v1/models", headers=HEADERS).json()["data"]]
        assert listed == ["tiny", "second", "fox"]
        texts = []
        for name in listed:
            answer = client.post("/v1/completions", json={**body, "model": name}, headers=HEADERS)
            assert (answer.status_code, answer.json()["model"]) == (200, name)
            texts.append(answer.json()["choices"][0]["text"])
        assert texts[0] == texts[1] != texts[2], "the adapter speaks where it is named"
        answer = client.post("/v1/completions", json=body, headers={"x-api-key": KEY})
        assert answer.status_code == 200
        counted = 'worker_key_requests_total{key="ann",model="",worker="gateway"} 1.0'
        assert counted in client.get("/metrics").text
        rays = "http://127.0.0.1:8265/api/serve/applications/"
        applications = httpx.get(rays, trust_env=False).text
        assert '"second"' in applications and TOKEN not in applications
        shown = [path for path in rays_files(alone) if path.is_file() and not path.is_socket()]
        written = b"".join(path.read_bytes() for path in shown)
        assert b'"key": "ann"' in written
        assert TOKEN.encode() not in written and KEY.encode() not in written

        # From a shell without the token, with a group whose model does not exist.
        done = alone.up(group("bad", 'model = "/nowhere.gguf"'))
        assert done.returncode == 3 and "nowhere.gguf" in done.stderr, done.stderr
        assert client.post("/v1/completions", json=body).status_code == 401
        for name in listed:
            answer = client.post("/v1/completions", json={**body, "model": name}, headers=HEADERS)
            assert answer.status_code == 200, answer.text
        done = alone.up(group("third"))
        assert done.returncode == 0, done.stderr
        states = json.loads(alone.command("status", "--json").stdout)
        assert {each["name"] for each in states} == {"third", "gateway"}
        answer = client.post("/v1/completions", json={**body, "model": "third"}, headers=HEADERS)
        assert answer.status_code == 200, answer.text

    # HTTPS, with a certificate beside the file; with a port in use nothing changes.
    certificate = own_certificate(alone.folder)
    tls = f'ssl_certfile = "{certificate.name}"\nssl_keyfile = "{certificate.name}"\n'
    done = alone.up(tls + group("third"))
    assert done.returncode == 0 and f"https://127.0.0.1:{alone.port}" in done.stdout, done.stderr
    trusted = ssl.create_default_context(cafile=certificate)
    uri = alone.uri.replace("http", "https")
    with httpx.Client(base_url=uri, verify=trusted, timeout=60, trust_env=False) as client:
        answer = client.post("/v1/completions", json=body, headers=HEADERS)
        assert answer.status_code == 401 or answer.json()["error"]["code"] == "model_not_found"
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            free, alone.port = alone.port, taken.getsockname()[1]
            done = alone.up(tls + group("third"))
            alone.port = free
        print(done.stderr)
        assert done.returncode == 3
        assert "gateway does not start: Port" in done.stderr and "in use" in done.stderr
        assert client.get("/v1/models", headers=HEADERS).status_code == 200


def test_a_group_gets_the_device_of_one_that_the_file_leaves_out(alone: Running) -> None:
    done = alone.up(file(2).replace('"tiny"', '"other"'))
    assert done.returncode == 0, done.stderr
    states = json.loads(alone.command("status", "--json").stdout)
    assert {each["name"]: each["running"] for each in states} == {"other": 2, "gateway": 1}
    done = alone.command("roll", "tiny")
    assert done.returncode == 2 and "no workers named 'tiny'; it has other" in done.stderr
