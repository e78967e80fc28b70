"""The projector of a model: the named one, or the only one beside it that fits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.random_models import random_model
from tests.support.random_projectors import random_projector
from worker.errors import ModelError
from worker.models.gguf.header import read_header
from worker.models.projector import resolve_projector
from worker.models.resolve import ResolvedModel
from worker.settings import Settings
from worker.wire.messages import ProjectorFile


def chosen(wanted: str | None, model: Path, **engine: Any) -> ProjectorFile | None:
    settings = Settings(mmproj=wanted, **engine)
    return resolve_projector(settings, ResolvedModel(read_header(model), str(model), "gguf"))


def test_the_projector_beside_the_model_is_found(tmp_path: Path) -> None:
    model = Path(shutil.copy(random_model("dense"), tmp_path / "dense.gguf"))
    fits = Path(shutil.copy(random_projector("gemma3"), tmp_path / "mmproj-dense-f32.gguf"))
    shutil.copy(random_projector("gemma3", 128), tmp_path / "mmproj-other.gguf")
    (tmp_path / "mmproj-damaged.gguf").write_text("no GGUF")
    assert chosen(None, model) == ProjectorFile(str(fits), is_named=False)
    assert chosen("none", model) is None
    assert chosen(None, model, pooling="mean") is None, "what embeds takes nothing else"
    shutil.copy(fits, tmp_path / "mmproj-dense-too.gguf")
    assert chosen(None, model) is None, "of two that fit, none is guessed"
    assert chosen(str(fits), model) == ProjectorFile(str(fits), is_named=True)


def test_a_named_projector_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = random_model("dense")
    for file, words in (
        (random_projector("gemma3", 128), "embeddings of 128 numbers"),
        (model, "a model of the architecture llama"),
        (tmp_path / "missing.gguf", "missing.gguf"),
    ):
        with pytest.raises(ModelError, match=words):
            chosen(str(file), model)
    with pytest.raises(ModelError, match="takes only text"):
        chosen(str(random_projector("gemma3")), model, pooling="mean")
