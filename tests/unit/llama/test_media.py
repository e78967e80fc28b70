"""What a projector makes of a picture, beside what transformers makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.support.random_models import random_model
from tests.support.random_projectors import AROUND_TILES, ProjectorKind, random_projector
from worker.devices.plan.projector import device_bytes
from worker.llama.media import MediaChunk, Projector
from worker.llama.model import LoadOptions, Model
from worker.models.gguf.header import read_header

DATA = Path(__file__).parents[2] / "data/pictures"
NAMES = sorted(folder.name for folder in DATA.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_are_those_of_transformers(name: str) -> None:
    """Of the file that `llorch-convert --mmproj` made of the checkpoint."""
    expected = np.load(DATA / name / "expected.npz")
    pixels, wanted = expected["pixels"], expected["rows"]
    architecture = "qwen3vl" if wanted.shape[1] > 64 else None
    path = random_model("dense", renamed=AROUND_TILES, architecture=architecture)
    model = Model(str(path), LoadOptions(mmap=False))
    projector = Projector(model, str(DATA / name / "mmproj.gguf"), None, 1)
    height, width, _ = pixels.shape
    pieces = projector.picture(width, height, pixels.tobytes())
    chunks = [piece for piece in pieces if isinstance(piece, MediaChunk)]
    for chunk in chunks:
        rows = projector.encode(chunk)
        if name == "pixtral":  # each line but the last ends with a row that the model knows
            rows = np.delete(rows, slice(width // 8, None, width // 8 + 1), axis=0)
        difference = np.abs(rows - wanted).max() / np.abs(wanted).max()
        print(f"{name}: {rows.shape}, {difference:.1e}")
        assert difference <= 1e-3
    assert chunks
    projector.close()
    model.close()


@pytest.mark.parametrize("kind", ["pixtral", "gemma3"])
def test_what_a_picture_of_any_size_takes_is_planned(kind: ProjectorKind) -> None:
    path = random_projector(kind, width=256)
    header = read_header(path)
    model = Model(str(random_model("dense")), LoadOptions(mmap=False))
    projector = Projector(model, str(path), None, 2)
    pieces = projector.picture(900, 700, bytes(3 * 900 * 700))
    [chunk] = [piece for piece in pieces if isinstance(piece, MediaChunk)]
    process = psutil.Process()
    before = process.memory_info().rss
    projector.encode(chunk)
    grown, planned = process.memory_info().rss - before, device_bytes(header) - header.tensor_bytes
    print(f"{kind}: {chunk.n_tokens} tokens, {grown:,} of {planned:,}")
    assert grown <= planned
    projector.close()
    model.close()
