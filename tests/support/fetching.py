"""Downloads as the tests call them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub_server import TOKEN
from worker.errors import DownloadError
from worker.models.hub.download import Downloaded, download
from worker.models.reference import HubReference, parse
from worker.wire.messages import OnProgress, Progress


def fetching(
    ref: str,
    cache_dir: Path,
    sha256: str | None = None,
    on_progress: OnProgress = lambda progress: None,
    **more: Any,
) -> Coroutine[Any, Any, Downloaded]:
    parsed = parse(ref)
    assert isinstance(parsed, HubReference)
    return download(parsed, cache_dir=cache_dir, sha256=sha256, on_progress=on_progress, **more)


def fetch(
    ref: str, cache_dir: Path, sha256: str | None = None, **more: Any
) -> tuple[Downloaded, list[Any]]:
    progress: list[Progress] = []
    return asyncio.run(fetching(ref, cache_dir, sha256, progress.append, **more)), progress


def failure(ref: str, cache_dir: Path, sha256: str | None = None) -> DownloadError:
    with pytest.raises(DownloadError) as caught:
        fetch(ref, cache_dir, sha256)
    assert caught.value.exit_code == 6
    assert "\n" not in caught.value.message
    assert TOKEN not in caught.value.message + repr(caught.value.details)
    return caught.value
