"""Downloads of several files, and the path from an alias to a checked model."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.fetching import fetch
from tests.support.hub_server import COMMIT, OTHER_COMMIT, Hub, Repo
from tests.support.samples import write_split
from worker.errors import ModelError
from worker.models.gguf.header import read_header
from worker.models.hub import remote
from worker.models.hub.cache import RepoCache
from worker.models.reference import HubReference, name_of, snapshot_of
from worker.models.resolve import bundled_folder, resolve, resolve_checkpoint
from worker.models.stored import stored_models
from worker.settings import Settings


def test_all_parts_of_a_split_model_are_fetched(hub: Hub, tmp_path: Path) -> None:
    parts = write_split(tmp_path, count=3)
    hub.large_bytes = 64
    hub.repos["o/r"] = Repo({f"q8/{p.name}": p.read_bytes() for p in parts})
    got, progress = fetch(f"hf:o/r@{COMMIT}::file=q8/{parts[1].name}", tmp_path / "cache")
    assert got.path.name == parts[0].name
    assert [p.read_bytes() for p in sorted(got.path.parent.iterdir())] == [
        p.read_bytes() for p in parts
    ]
    percents = [p.percent for p in progress if p.phase == "download"]
    assert percents == sorted(percents) and percents[-1] == 100.0
    hub.requests.clear()
    got.path.with_name(parts[2].name).resolve().unlink()
    fetch(f"hf:o/r@{COMMIT}::file=q8/{parts[0].name}", tmp_path / "cache")
    assert [path for path, _ in hub.bodies() if path.startswith("/blobs/")] == [
        f"/blobs/o/r/q8/{parts[2].name}?signature=xyz"
    ]


def test_an_incomplete_checkpoint_is_completed(hub: Hub, tmp_path: Path) -> None:
    """Even if the existing files would do: a small file, a pooling, or an unlisted shard may be
    missing."""
    files = {p.name: p.read_bytes() for p in bundled_folder().iterdir() if p.is_file()}
    shard = files.pop("model.safetensors")
    files |= {"weights-1.safetensors": shard, "weights-2.safetensors": shard}
    files |= {"modules.json": b"[]", "2_Pooling/config.json": b"{}"}
    hub.repos["o/r"] = Repo(files)
    got, _ = fetch("hf:o/r", tmp_path / "cache")
    for name in files.keys() - {"README.md", "config.json"}:
        (got.path / name).unlink()
        again, _ = fetch("hf:o/r", tmp_path / "cache")
        assert (again.path / name).read_bytes() == files[name], name


def test_a_checkpoint_in_the_users_cache_is_not_fetched_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is complete, which only the hub's listing shows."""
    files = {p.name: p.read_bytes() for p in bundled_folder().iterdir() if p.is_file()}
    hub.repos["o/r"] = Repo(files | {"chat_template.jinja": b"{{ messages }}"})
    users, _ = fetch("hf:o/r", tmp_path / "users")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "users/hub"))
    hub.requests.clear()
    for ref in ("hf:o/r", f"hf:o/r@{COMMIT}"):
        found, _ = fetch(ref, tmp_path / "cache")
        assert found.path == users.path and not hub.bodies()
    (users.path / "chat_template.jinja").unlink()
    for cache in ("cache", "another"):
        own, _ = fetch(f"hf:o/r@{COMMIT}", tmp_path / cache)
        assert own.path.is_relative_to(tmp_path / cache)
        assert (own.path / "chat_template.jinja").exists()


def test_a_branch_in_the_users_cache_damages_no_listing(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, users = tmp_path / "cache", tmp_path / "users"
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    first, _ = fetch("hf:o/r::file=m.gguf", cache)
    other = gguf_bytes + b"\0" * 32
    hub.repos["o/r"] = Repo({"m.gguf": other}, branches={"main": OTHER_COMMIT})
    downloaded, _ = fetch("hf:o/r::file=m.gguf", users)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(users / "hub"))
    found, _ = fetch("hf:o/r::file=m.gguf", cache)
    assert found.path == downloaded.path
    stored = stored_models(cache)
    assert [each.key for each in stored] == [first.commit]
    assert RepoCache(cache, "o/r").commit_of("main") == OTHER_COMMIT


def test_the_hubs_own_cache_is_used_and_verified(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes
) -> None:
    """A file that another tool downloaded is not downloaded again, unless it is damaged."""
    store = tmp_path / "shared/models--o--r"
    blob = store / "blobs" / hashlib.sha256(gguf_bytes).hexdigest()
    link = store / "snapshots" / COMMIT / "m.gguf"
    for folder in (blob.parent, link.parent):
        folder.mkdir(parents=True)
    blob.write_bytes(gguf_bytes)
    link.symlink_to(blob)
    ref = f"hf:o/r@{COMMIT}::file=m.gguf"
    got, _ = fetch(ref, tmp_path / "cache")
    assert got.path == link and hub.requests == []
    blob.write_bytes(gguf_bytes[:-1] + b"!")
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes})
    again, _ = fetch(ref, tmp_path / "cache")
    assert again.path != link and again.path.read_bytes() == gguf_bytes


def test_a_sharded_checkpoint_is_fetched_by_its_index(hub: Hub, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    hub.repos["o/w"] = Repo(
        {
            "config.json": b"{}",
            "tokenizer.json": b"{}",
            "README.md": b"not needed",
            "model.safetensors.index.json": json.dumps(index).encode(),
            "model-1.safetensors": bytes(2000),
            "model-2.safetensors": bytes(3000),
            "consolidated.safetensors": bytes(9000),
            "onnx/model.safetensors": bytes(9000),
        }
    )
    got, _ = fetch("hf:o/w", tmp_path / "cache")
    assert got.path.is_dir()
    assert sorted(p.name for p in got.path.iterdir()) == [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    hub.requests.clear()
    assert fetch(f"hf:o/w@{COMMIT}", tmp_path / "cache")[0] == got
    assert hub.requests == []


def test_a_repository_of_several_ggufs_needs_a_file(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["o/one"] = Repo({"README.md": b"", "m.gguf": gguf_bytes})
    hub.repos["o/two"] = Repo({"a.gguf": gguf_bytes, "b.gguf": gguf_bytes})
    hub.repos["o/none"] = Repo({"README.md": b""})
    hub.repos["o/bad"] = Repo({"config.json": b"", "model.safetensors.index.json": b"[]"})
    got, _ = fetch("hf:o/one", tmp_path / "cache")
    assert got.path.read_bytes() == gguf_bytes
    hub.requests.clear()
    assert fetch(f"hf:o/one@{COMMIT}", tmp_path / "cache")[0] == got and hub.requests == []
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert fetch("hf:o/one", tmp_path / "cache")[0] == got
    with pytest.raises(ModelError, match=r"name one, as in hf:o/two::file=a.gguf"):
        fetch("hf:o/two", tmp_path / "cache")
    with pytest.raises(ModelError, match="neither SafeTensors"):
        fetch("hf:o/none", tmp_path / "cache")
    with pytest.raises(ModelError, match="must hold a JSON object"):
        fetch("hf:o/bad", tmp_path / "cache")


def test_weights_without_a_tokenizer_are_not_fetched(hub: Hub, tmp_path: Path) -> None:
    """As Hunyuan publishes them."""
    files = {"config.json": b"{}", "model.safetensors": bytes(64), "hy.tiktoken": b""}
    hub.repos["o/ranks"] = Repo(files)
    with pytest.raises(ModelError, match=r"has none of .* \(hy.tiktoken can be read only by"):
        fetch("hf:o/ranks", tmp_path / "cache")
    assert not any("model.safetensors" in request for request in hub.requests)


@pytest.mark.parametrize("revision", ["", f"@{COMMIT}"])
@pytest.mark.parametrize(
    ("names", "file", "expected"),
    [
        ({"m.gguf": 0, "mmproj-F32.gguf": 2, "mmproj-F16.gguf": 1}, "", "mmproj-F16.gguf"),
        ({"q8/m.gguf": 0, "q8/a-mmproj.gguf": 2, "MMPROJ-b.gguf": 1}, "", "q8/a-mmproj.gguf"),
        ({"q8/m.gguf": 0, "mmproj.gguf": 2, "f16/mmproj.gguf": 1}, "", "mmproj.gguf"),
        ({"a.gguf": 0, "b.gguf": 0, "mmproj.gguf": 1}, "::file=b.gguf", "mmproj.gguf"),
        ({"m.gguf": 0}, "", None),
    ],
)
def test_the_smallest_projector_comes_with_a_model_and_stays(
    hub: Hub,
    tmp_path: Path,
    gguf_bytes: bytes,
    revision: str,
    names: dict[str, int],
    file: str,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.repos["o/r"] = Repo({name: gguf_bytes + bytes(more) for name, more in names.items()})
    ref = f"hf:o/r{revision}{file}"
    blind, _ = fetch(ref, tmp_path)
    assert blind.projector is None and len(hub.bodies()) == 1
    got, _ = fetch(ref, tmp_path, projector=True)
    snapshot = tmp_path / "hub/models--o--r/snapshots" / COMMIT
    assert got.path == blind.path
    assert got.projector == (snapshot / expected if expected else None)
    hub.requests.clear()
    if file:
        monkeypatch.setattr(remote, "ATTEMPTS", 1)
        hub.fail_with = (500, {})
    assert fetch(ref, tmp_path, projector=True)[0] == got and hub.bodies() == []


def test_an_index_cannot_name_files_elsewhere(hub: Hub, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../../evil.safetensors"}}
    hub.repos["o/w"] = Repo(
        {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    )
    with pytest.raises(ModelError, match="invalid shard"):
        fetch("hf:o/w", tmp_path / "cache")


def test_resolve_downloads_the_file_of_an_alias_and_checks_it(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes
) -> None:
    hub.repos["o/r"] = Repo({"m.gguf": gguf_bytes, "text.gguf": b"Once upon a time" * 100})
    models = tmp_path / "models.toml"
    models.write_text(
        f"[models.mine]\nrepo='o/r'\nfile='m.gguf'\n"
        f"sha256='{hashlib.sha256(gguf_bytes).hexdigest()}'\n"
        f"[models.wrong]\nrepo='o/r'\nfile='text.gguf'\n"
    )
    settings = Settings(models_file=models, cache_dir=tmp_path / "c")
    found = asyncio.run(resolve(settings, "mine"))
    assert found.gguf_path.read_bytes() == gguf_bytes
    assert (found.model_ref, found.kind) == ("mine", "hub")
    with pytest.raises(ModelError, match="not a usable GGUF"):
        asyncio.run(resolve(settings, "wrong"))


def test_resolve_converts_a_repository_of_safetensors(hub: Hub, tmp_path: Path) -> None:
    files = {p.name: p.read_bytes() for p in bundled_folder().iterdir() if p.is_file()}
    hub.repos["o/tiny"] = Repo(files)
    found = asyncio.run(resolve(Settings(cache_dir=tmp_path / "c"), "hf:o/tiny"))
    assert (found.model_ref, found.kind) == ("hf:o/tiny", "hub")
    header = read_header(found.gguf_path)
    assert (header.quant_kind, header.vocab_size) == ("Q8_0", 1024)
    assert header.name is not None and header.name.lower() == "tiny"
    source = asyncio.run(resolve_checkpoint("hf:o/tiny", None, tmp_path / "c"))
    assert snapshot_of(source) == HubReference("o/tiny", COMMIT) and name_of(source) == "tiny"
    assert (source / "model.safetensors").read_bytes() == files["model.safetensors"]
