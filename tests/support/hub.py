"""A running hub, and a small real GGUF to put on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.hub_server import Hub, running_hub
from tests.support.samples import write_gguf


def set_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as running:
        # For child processes; this one has already read its environment.
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "shared"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf/token"))
        set_endpoint(monkeypatch, running.url)
        yield running


@pytest.fixture
def gguf_bytes(tmp_path: Path) -> bytes:
    return write_gguf(tmp_path / "sample.gguf").read_bytes()
