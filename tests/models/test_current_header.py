"""A header that has crossed the pipe: used while the file is what it was, and read anew then."""

from __future__ import annotations

import pickle
from pathlib import Path

from tests.models.samples import write_gguf
from worker.models.gguf.header import current_header, read_header


def test_a_known_header_is_used_while_the_file_has_its_size(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    known = pickle.loads(pickle.dumps(read_header(path)))
    assert known == read_header(path)
    assert current_header(known, path) is known
    assert current_header(None, path) == known
    write_gguf(path, overrides={"general.name": "Another model of this name"})
    assert current_header(known, path).name == "Another model of this name"
    other = write_gguf(tmp_path / "other.gguf")
    assert current_header(known, other).path == other
