"""The files of the page, as the worker serves them; `tests/page` shows them to a browser."""

from __future__ import annotations

import hashlib
import re

from tests.support.worker import ROOT, WorkerProcess


def test_the_page_is_light_and_closed(worker: WorkerProcess) -> None:
    response = worker.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    folder = ROOT / "worker" / "assets" / "page"
    served = [p for p in folder.rglob("*") if p.suffix in (".html", ".css", ".js", ".svg")]
    assert sum(p.stat().st_size for p in served) < 200_000
    for path in served:
        name = path.relative_to(folder).as_posix()
        answer = worker.get("/" if name == "index.html" else f"/page/{name}")
        assert answer.content == path.read_bytes()
    assert worker.get("/page/../../settings.py").status_code == 404


def test_the_vendored_libraries_are_the_published_ones() -> None:
    folder = ROOT / "worker" / "assets" / "page" / "vendor"
    rows = re.findall(
        r"^\| `(\S+)` .*`([0-9a-f]{64})` \|$", (folder / "README.md").read_text(), re.M
    )
    listed = dict(rows)
    found = {path.name for path in folder.iterdir() if path.suffix in (".js", ".css")}
    assert found == set(listed)
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
