"""Every form of a model reference, and the error for each wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.errors import ConfigError
from worker.models.hub.cache import RepoCache
from worker.models.reference import HubReference, name_of, parse, snapshot_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tiny-model", "tiny-model"),
        ("qwen2.5-0.5b", "qwen2.5-0.5b"),
        ("model.gguf", Path("model.gguf")),
        ("./model", Path("model")),
        ("/models/x", Path("/models/x")),
        ("models/x.gguf", Path("models/x.gguf")),
        ("~/x.gguf", Path.home() / "x.gguf"),
        ("hf:o/r", HubReference("o/r")),
        ("hf:gpt2", HubReference("gpt2")),
        ("hf:o/r@main", HubReference("o/r", "main")),
        ("hf:o/r@refs/pr/1", HubReference("o/r", "refs/pr/1")),
        ("hf:o/r::file=a/b.gguf", HubReference("o/r", None, "a/b.gguf")),
        (f"hf:o/r@{COMMIT}::file=b.gguf", HubReference("o/r", COMMIT, "b.gguf")),
        ("hf:o/r:Q4_K_M", HubReference("o/r", quantisation="Q4_K_M")),
        ("hf:o/r:UD-Q4_K_XL@main", HubReference("o/r", "main", quantisation="UD-Q4_K_XL")),
    ],
)
def test_valid_references_are_parsed(text: str, expected: object) -> None:
    parsed = parse(text)
    assert parsed == expected
    if isinstance(parsed, HubReference):
        assert str(parsed) == text
        assert parsed.is_pinned == (COMMIT in text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be an alias"),
        (" x", "must be an alias"),
        ("a\0b", "must be an alias"),
        (
            "https://me:secret@example.org/x.gguf?key=secret",
            "'https://example.org/x.gguf' is a https",
        ),
        ("hf:", "hf:owner/repo"),
        ("hf:a/b/c", "hf:owner/repo"),
        ("hf:../b", "hf:owner/repo"),
        ("hf:o/r:", "quantisation such as hf:o/r:Q4_K_M"),
        ("hf:o/r:Q4/K", "quantisation such as hf:o/r:Q4_K_M"),
        ("hf:o/r:Q4_K_M::file=x.gguf", "names a file and a quantisation"),
        ("hf:o/r@", "ill-formed revision"),
        ("hf:o/r@main:Q4_K_M", "ill-formed revision"),
        ("hf:o/r@a b", "ill-formed revision"),
        ("hf:o/r@../x", "ill-formed revision"),
        ("hf:o/r::path=x.gguf", "unknown option 'path'"),
        ("hf:o/r::file=", "path inside the repository"),
        ("hf:o/r::file=/x.gguf", "path inside the repository"),
        ("hf:o/r::file=../x.gguf", "path inside the repository"),
        ("hf:o/r::file=a//x.gguf", "path inside the repository"),
        ("hf:o/r::file=a\\x.gguf", "path inside the repository"),
        ("hf:o/r::file=x.bin", "a .gguf file"),
        ("hf:o/r::file=x.gguf::file=y.gguf", "names two files"),
    ],
)
def test_invalid_references_are_refused_with_the_reason(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert words in caught.value.message
    assert "secret" not in f"{caught.value.message} {caught.value.details}"
    assert caught.value.details["field"] == "model"
    assert caught.value.exit_code == 2


@given(
    st.text(max_size=40), st.sampled_from(["", "~", "hf:", "hf:o/r", "hf:o/r@", "hf:o/r::file="])
)
def test_any_text_is_parsed_or_refused(rest: str, start: str) -> None:
    try:
        parsed = parse(start + rest)
    except ConfigError as error:
        assert error.message
    else:
        assert isinstance(parsed, str | Path | HubReference)


def test_a_snapshot_is_recognised_by_its_path(tmp_path: Path) -> None:
    cache = RepoCache(tmp_path, "owner/some-name")
    folder = cache.snapshot(COMMIT)
    assert str(snapshot_of(folder)) == f"hf:owner/some-name@{COMMIT}"
    assert name_of(folder) == "some-name"
    for other in (folder.parent, folder.with_name("main"), tmp_path / "snapshots" / COMMIT):
        assert snapshot_of(other) is None and name_of(other) == other.name
