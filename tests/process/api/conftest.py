"""HTTP APIs over scripted supervisors or a scripted engine, and OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.support.scripted_api import scripted
from tests.support.supervised import script
from tests.support.worker import WorkerProcess

__all__ = ["script", "scripted"]


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{worker.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client
