"""Draft models must have the model's vocabulary, except for its last tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.bundled import bundled_gguf
from tests.support.devices.tiny_gguf import Shape, write
from tests.support.hub_server import Hub, Repo
from worker.errors import ModelError
from worker.models.draft import resolve_draft
from worker.models.gguf.header import read_header
from worker.settings import Settings
from worker.wire.messages import DraftFile


def found(draft: Path, model: Path) -> DraftFile | None:
    return asyncio.run(resolve_draft(Settings(draft=str(draft)), read_header(model)))


def refused(draft: Path, model: Path) -> str:
    with pytest.raises(ModelError) as caught:
        found(draft, model)
    return caught.value.message


def test_vocabularies_may_differ_in_their_last_tokens(tmp_path: Path) -> None:
    """As families pad theirs; the first different token is named."""
    model = write(tmp_path / "model.gguf", Shape())
    longer = write(tmp_path / "longer.gguf", Shape(vocabulary=400))
    assert found(longer, model) == DraftFile(str(longer), str(longer))
    much_longer = write(tmp_path / "much-longer.gguf", Shape(vocabulary=1400))
    assert "it has 1,400 tokens, the model has 320" in refused(much_longer, model)
    raw = longer.read_bytes()
    assert raw.count(b"w50") == 1
    longer.write_bytes(raw.replace(b"w50", b"v50"))
    assert "its token 309 is 'v50', the model's is 'w50'" in refused(longer, model)


def test_the_quantisation_of_a_draft_model_is_chosen_by_the_memory_that_is_left(
    hub: Hub, tmp_path: Path
) -> None:
    model = read_header(bundled_gguf("q8_0"))
    raw, n = model.path.read_bytes(), model.size_bytes
    hub.repos["o/m"] = Repo({"m-Q4_0.gguf": raw, "m-Q8_0.gguf": raw + bytes(4096)})
    settings = Settings(draft="hf:o/m", cache_dir=tmp_path)
    for spare, name in ((8192, "m-Q8_0.gguf"), (10, "m-Q4_0.gguf")):
        draft = asyncio.run(resolve_draft(settings, model, room=lambda: 3 * n + spare))  # noqa: B023
        assert draft is not None and Path(draft.path).name == name
    with pytest.raises(ModelError, match="is served if it is named"):
        asyncio.run(resolve_draft(settings, model, room=lambda: n))


def test_another_tokenizer_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    model = bundled_gguf("q8_0")
    other = write(tmp_path / "other-words.gguf", Shape())
    assert "its tokenizer is gguf-spm, the model's is gguf-bpe" in refused(other, model)
    assert "There is no file or folder" in refused(tmp_path / "nowhere.gguf", model)
