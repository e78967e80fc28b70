"""The page's libraries, and for whom its files are compressed."""

from __future__ import annotations

import hashlib
import re

from tests import ROOT
from worker.api.http.page import takes_gzip


def test_a_page_is_compressed_only_for_clients_that_accept_gzip() -> None:
    for accepted in ("gzip", "br, gzip;q=0.1", "GZIP ; q=1.0", "identity, gzip"):
        assert takes_gzip(accepted), accepted
    for accepted in ("", "br", "gzip;q=0, identity", "gzip ; q=0.00", "x-gzip"):
        assert not takes_gzip(accepted), accepted


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
