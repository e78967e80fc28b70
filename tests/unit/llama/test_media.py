"""What a projector makes of a picture, beside what transformers makes of it, and what waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import pytest

from tests.support.random_models import random_model
from tests.support.random_projectors import AROUND_TILES, ProjectorKind, random_projector
from worker.devices.plan.projector import device_bytes
from worker.engine.media.decoding import Decoder, Picture
from worker.engine.media.reader import MOST_WAITING_TOKENS, MediaReader
from worker.engine.media.span import PromptTokens
from worker.errors import QueueFull
from worker.llama.media import MediaChunk, Projector
from worker.llama.model import LoadOptions, Model
from worker.models.gguf.header import read_header
from worker.wire.work import Medium

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
    grown, planned = (
        process.memory_info().rss - before,
        device_bytes(header, 4096) - header.tensor_bytes,
    )
    print(f"{kind}: {chunk.n_tokens} tokens, {grown:,} of {planned:,}")
    assert grown <= planned
    projector.close()
    model.close()


def test_a_pictures_tokens_are_bounded_by_kind_file_and_context() -> None:
    header = read_header(random_projector("pixtral", width=256))

    def planned(context_length: int, **vision: int | str) -> int:
        changed = {f"clip.vision.{name}": value for name, value in vision.items()}
        told = replace(header, metadata={**header.metadata, **changed})
        return device_bytes(told, context_length) - header.tensor_bytes

    youtu: dict[str, int | str] = {"projector_type": "youtuvl"}
    assert planned(1 << 17, **youtu) == planned(4096, **youtu) > 2 * planned(1024, **youtu)
    dots: dict[str, int | str] = {"projector_type": "dots_ocr", "image_max_pixels": 8 * 8 * 40_000}
    assert planned(1 << 17, **dots) > 9 * planned(1024, **dots)
    assert planned(1 << 17, **dots, spatial_merge_size=1) == planned(1 << 17, **dots)

    model = Model(str(random_model("dense")), LoadOptions(mmap=False))
    projector = Projector(model, str(header.path), None, 1, most_tokens=64)
    [chunk] = [
        piece
        for piece in projector.picture(900, 700, bytes(3 * 900 * 700))
        if isinstance(piece, MediaChunk)
    ]
    assert chunk.n_tokens <= 64 + 8  # a row at each line's end beside the picture's own
    projector.close()
    model.close()


def test_decoded_media_that_wait_are_bounded() -> None:
    """What a request that has gone held makes room for the next ones."""

    class Decoded:
        def decode(self, medium: Medium, sample_rate: int) -> Picture:
            return Picture(64, 64, bytes(3 * 64 * 64))

    model = Model(str(random_model("dense")), LoadOptions(mmap=False))
    projector = Projector(model, str(random_projector("gemma3")), None, 1)
    reader = MediaReader(projector, cast(Decoder, Decoded()), 512, -MOST_WAITING_TOKENS + 600)
    waiting: list[PromptTokens] = []
    with pytest.raises(QueueFull):
        for number in range(1000):
            prompt = PromptTokens()
            reader.read(Medium("image", bytes([number % 256]), "messages"), prompt)
            waiting.append(prompt)
    n_tokens = sum(span.n_tokens for prompt in waiting for span in prompt.spans)
    assert 600 <= n_tokens < 600 + waiting[0].spans[0].n_tokens
    waiting.pop()
    prompt = PromptTokens()
    reader.read(Medium("image", b"", "messages"), prompt)
    assert prompt.spans
    projector.close()
    model.close()
