"""`models.toml`: the shipped file is valid, and a user's is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ROOT
from worker.errors import ConfigError, ModelError
from worker.models import registry
from worker.models.reference import HubReference


def test_the_shipped_registry_is_sound() -> None:
    shipped = registry.load(ROOT / "models.toml")
    assert len(shipped.entries) >= 12
    assert shipped.find("tiny-model").bundled
    for entry in shipped.entries.values():
        assert entry.description and entry.parameters and entry.context_length
        if entry.hub is not None:
            assert entry.hub.file and entry.hub.file.endswith(".gguf")
            assert entry.sha256 and entry.size_bytes and entry.quantization
            assert entry.hub.revision is None or entry.hub.is_pinned
    hashes = [entry.sha256 for entry in shipped.entries.values() if entry.sha256]
    assert len(set(hashes)) == len(hashes)


def test_an_entry_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        f"""
        [models.story]
        repo = "owner/repo"
        revision = "v1"
        file = "sub/story-00001-of-00002.gguf"
        sha256 = "{"a" * 64}"
        context_length = 4096
        [models."local.one"]
        path = "models/x.gguf"
        [models.checkpoint]
        repo = "owner/weights"
        """
    )
    loaded = registry.load(file)
    story = loaded.find("story")
    assert story.hub == HubReference("owner/repo", "v1", "sub/story-00001-of-00002.gguf")
    assert (story.sha256, story.context_length) == ("a" * 64, 4096)
    assert story.source == "hf:owner/repo@v1::file=sub/story-00001-of-00002.gguf"
    assert loaded.find("local.one").path == str(tmp_path / "models/x.gguf")
    assert loaded.find("checkpoint").hub == HubReference("owner/weights")
    assert list(loaded.entries) == ["story", "local.one", "checkpoint"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[models.a]\nrepo = 'o/r'\nrevison = 'x'",
            "models.a.revison is not a field; did you mean revision?",
        ),
        ("[models.a]\nrepo = 'o/r'\nwhat = 'x'", "models.a.what is not a field; known are repo"),
        ("[model.a]\nrepo = 'o/r'", "model is not a field; did you mean models?"),
        ("models = 3", "models: it must be a table"),
        ("[models]\na = 3", "models.a: it must be a table"),
        ("[models.a]", "models.a: exactly one of repo, path and bundled"),
        ("[models.a]\nrepo = 'o/r'\npath = 'x'", "exactly one of"),
        ("[models.a]\nbundled = false", "exactly one of"),
        ("[models.a]\nbundled = 'yes'", "models.a.bundled: it must be true or false"),
        ("[models.a]\npath = 'x'\nsha256 = 'y'", "models.a: sha256 is given without repo"),
        ("[models.a]\nrepo = 'o/r'\nfile = 'x.gguf'\nsha256 = 'abc'", "64 lower-case hex"),
        ("[models.a]\nrepo = 'o/r'\nfile = 'x.bin'", "must give a .gguf file"),
        ("[models.a]\nrepo = 'o/r'\nfile = '../x.gguf'", "path inside the repository"),
        ("[models.a]\nrepo = 'o/r@v1'", "ambiguous"),
        ("[models.a]\nrepo = 'o r'", "hf:owner/repo"),
        (
            "[models.a]\nrepo = 'o/r'\ncontext_length = 0",
            "models.a.context_length: it must be more than 0",
        ),
        (
            "[models.a]\nrepo = 'o/r'\ncontext_length = true",
            "context_length: it must be a whole number",
        ),
        ("[models.a]\nrepo = 7", "models.a.repo: it must be a text"),
        ("[models.'a b']\nrepo = 'o/r'", "the alias 'a b' is ill-formed"),
        ("[models.'x.gguf']\nrepo = 'o/r'", "the alias 'x.gguf' is ill-formed"),
        ("[models.a\n", "not valid TOML"),
        ("[models.a]\nrepo = 'o/r'\n[models.a]\nrepo = 'o/r'", "not valid TOML"),
    ],
)
def test_each_fault_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        registry.load(file)
    assert words in caught.value.message
    assert caught.value.details["field"] == "models_file"


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        registry.load(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        registry.load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(ConfigError, match="not valid TOML"):
        registry.load(tmp_path / "latin.toml")


def test_an_unknown_alias_names_the_nearest() -> None:
    with pytest.raises(ModelError, match="did you mean .*qwen3-0.6b"):
        registry.load(ROOT / "models.toml").find("qwen3-0.6")


def test_an_unknown_alias_of_an_empty_file_says_that_it_is_empty(tmp_path: Path) -> None:
    (tmp_path / "models.toml").touch()
    with pytest.raises(ModelError, match="it has no models"):
        registry.load(tmp_path / "models.toml").find("qwen3-0.6")


def test_the_working_folder_comes_before_the_shipped_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert registry.load().find("tiny-model").bundled
    (tmp_path / "models.toml").write_text("[models.mine]\npath = 'm.gguf'")
    assert list(registry.load().entries) == ["mine"]
