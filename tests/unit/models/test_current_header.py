"""A header that has crossed the pipe: used while the file is what it was, and read anew then."""

from __future__ import annotations

from pathlib import Path

from tests.support.samples import write_gguf
from worker.models.gguf.header import current_header, packed, read_header


def test_a_known_header_is_used_while_the_file_has_its_size(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    known = packed(read_header(path))
    assert current_header(known, path) == current_header(None, path) == read_header(path)
    write_gguf(path, overrides={"general.name": "Another model of this name"})
    assert current_header(known, path).name == "Another model of this name"
    other = write_gguf(tmp_path / "other.gguf")
    assert current_header(known, other).path == other
