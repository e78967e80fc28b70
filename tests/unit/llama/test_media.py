"""A projector's embeddings of a picture, compared with transformers', and pending media."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import soundfile

from tests.support.random_models import random_model
from tests.support.random_projectors import AROUND_TILES, ProjectorKind, random_projector
from worker.devices.plan.projector import device_bytes
from worker.engine.media import sound as sounds
from worker.engine.media.decoder import Decoder, Picture, Sound
from worker.engine.media.reader import MOST_WAITING_TOKENS, MediaReader
from worker.engine.media.span import PromptTokens
from worker.engine.media.start import line_break_of
from worker.errors import QueueFull
from worker.llama.media import MediaChunk, Projector, _bindings, mend_breaks
from worker.llama.model import LoadOptions, Model
from worker.models.gguf.header import read_header
from worker.wire.work import Medium

DATA = Path(__file__).parents[2] / "data/pictures"
NAMES = sorted(folder.name for folder in DATA.iterdir())


@contextmanager
def projecting(
    path: Path,
    threads: int = 1,
    *,
    beside: Path | None = None,
    among_nan: bool = False,
    **options: Any,
) -> Iterator[Projector]:
    """A projector beside a model, by default a random one of the usual width; `among_nan`: in
    memory that contained NaN before."""
    model = Model(str(beside or random_model("dense")), LoadOptions(mmap=False))
    line_break = line_break_of(read_header(path))  # otherwise uninitialised memory decides
    with closing(model):
        if among_nan:
            _leave_nan_in_free_memory()
        projector = Projector(model, str(path), None, threads, line_break=line_break, **options)
        with closing(projector):
            yield projector


def recorded(name: str) -> tuple[Any, Any, Path]:
    """Return a picture, transformers' embeddings of it, and a model of their width."""
    expected = np.load(DATA / name / "expected.npz")
    architecture = "qwen3vl" if expected["rows"].shape[1] > 64 else None
    beside = random_model("dense", renamed=AROUND_TILES, architecture=architecture)
    return expected["pixels"], expected["rows"], beside


def chunks_of(projector: Projector, width: int, height: int) -> list[MediaChunk]:
    """Return the chunks of a black picture."""
    pieces = projector.picture(width, height, bytes(3 * width * height))
    return [piece for piece in pieces if isinstance(piece, MediaChunk)]


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_are_those_of_transformers(name: str) -> None:
    """With the file that `llorch-convert --mmproj` made from the checkpoint."""
    pixels, wanted, beside = recorded(name)
    height, width, _ = pixels.shape
    with projecting(DATA / name / "mmproj.gguf", beside=beside, among_nan=True) as projector:
        pieces = projector.picture(width, height, pixels.tobytes())
        chunks = [piece for piece in pieces if isinstance(piece, MediaChunk)]
        assert chunks
        for rows in map(projector.encode, chunks):
            if name == "pixtral":  # each line except the last ends with a row from the model
                rows = np.delete(rows, slice(width // 8, None, width // 8 + 1), axis=0)
            difference = np.abs(rows - wanted).max() / np.abs(wanted).max()
            print(f"{name}: {rows.shape}, {difference:.1e}")
            assert difference <= 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_the_pulse_of_an_encoding_changes_no_bit_of_it(name: str) -> None:
    """By another process, during the encoding."""
    pixels, _, beside = recorded(name)
    height, width, _ = pixels.shape
    pulse = memoryview(bytearray(64))
    rows = []
    ways: tuple[dict[str, Any], ...] = ({}, {"pulse": pulse})
    for options in ways:
        with projecting(DATA / name / "mmproj.gguf", beside=beside, **options) as projector:
            pieces = projector.picture(width, height, pixels.tobytes())
            chunks = [piece for piece in pieces if isinstance(piece, MediaChunk)]
            before = pulse.cast("q")[0]
            rows.append([projector.encode(chunk) for chunk in chunks])
            assert (pulse.cast("q")[0] - before > 20) == bool(options)
    for plain, counted in zip(*rows, strict=True):
        assert np.array_equal(plain, counted)


@pytest.mark.parametrize("seed", range(20))
def test_breaks_between_lines_with_nan_are_mended(seed: int) -> None:
    """libmtmd computes them from uninitialised memory times 0, where NaN stays NaN."""
    random = np.random.default_rng(seed)
    n_columns, n_lines = random.integers((1, 2), 9)
    line_break = random.standard_normal(4, dtype=np.float32)
    rows = random.standard_normal(((n_columns + 1) * n_lines - 1, 4), dtype=np.float32)
    rows[n_columns :: n_columns + 1] = line_break
    expected = rows.copy()
    breaks = rows[n_columns :: n_columns + 1]
    breaks[random.random(breaks.shape) < 0.7] = np.nan
    damaged = rows.copy()
    damaged[int(random.integers(n_columns))] = np.inf
    assert not mend_breaks(damaged, line_break)
    assert not mend_breaks(np.full_like(rows, np.nan), line_break)
    damaged = rows.copy()
    damaged[0, 0] = np.nan
    assert not mend_breaks(damaged, line_break), "one value of a row that is not a break"
    assert mend_breaks(rows, line_break)
    assert np.array_equal(rows, expected)


def test_a_picture_is_encoded_where_memory_held_nan() -> None:
    path = random_projector("pixtral", width=256)
    with projecting(path, among_nan=True) as projector:
        [chunk] = chunks_of(projector, 300, 200)
        rows = projector.encode(chunk)
    n_lines = int((rows == line_break_of(read_header(path))).all(axis=1).sum()) + 1
    assert n_lines > 1 and (len(rows) + 1) % n_lines == 0


def _leave_nan_in_free_memory() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.free(libc.malloc(31 << 20))  # from here on, blocks of up to this size are in the heap
    blocks = [libc.malloc(15 << 20) for _ in range(4)]
    for block in blocks:
        libc.memset(block, 0xFF, 15 << 20)
    for block in blocks:
        libc.free(block)


@pytest.mark.parametrize("kind", ["pixtral", "gemma3"])
def test_the_memory_of_a_picture_is_planned(kind: ProjectorKind) -> None:
    path = random_projector(kind, width=256)
    header, process = read_header(path), psutil.Process()
    planned = device_bytes(header, 4096) - header.tensor_bytes
    with projecting(path, threads=2) as projector:
        [chunk] = chunks_of(projector, 900, 700)
        before = process.memory_info().rss
        projector.encode(chunk)
        grown = process.memory_info().rss - before
    print(f"{kind}: {chunk.n_tokens} tokens, {grown:,} of {planned:,}")
    assert grown <= planned


def test_a_pictures_tokens_are_limited_by_kind_file_and_context() -> None:
    header = read_header(random_projector("pixtral", width=256))

    def planned(context_length: int, **vision: int | str) -> int:
        changed = {f"clip.vision.{name}": value for name, value in vision.items()}
        changed_header = replace(header, metadata={**header.metadata, **changed})
        return device_bytes(changed_header, context_length) - header.tensor_bytes

    youtu: dict[str, int | str] = {"projector_type": "youtuvl"}
    assert planned(1 << 17, **youtu) == planned(4096, **youtu) > 2 * planned(1024, **youtu)
    dots: dict[str, int | str] = {"projector_type": "dots_ocr", "image_max_pixels": 8 * 8 * 40_000}
    assert planned(1 << 17, **dots) > 9 * planned(1024, **dots)
    assert planned(1 << 17, **dots, spatial_merge_size=1) == planned(1 << 17, **dots)
    with projecting(header.path, most_tokens=64) as projector:
        [chunk] = chunks_of(projector, 900, 700)
    assert chunk.n_tokens <= 64 + 8  # a row at each line's end in addition to the picture's


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_an_mp3_ends_where_its_tag_says(share: float) -> None:
    """Like libmtmd's own decoder; the tag may state less than there is."""
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 4 * 44_100)
    soundfile.write(file := io.BytesIO(), noise, 44_100, format="MP3", bitrate_mode="VARIABLE")
    encoded = bytearray(file.getvalue())
    at = encoded.index(b"Xing") + 8
    n_frames = int.from_bytes(encoded[at : at + 4], "big")
    encoded[at : at + 4] = round(share * n_frames).to_bytes(4, "big")
    heard = sounds.decode(bytes(encoded), 16_000, 60.0)
    assert isinstance(heard, Sound)
    data, mtmd = (ctypes.c_uint8 * len(encoded)).from_buffer_copy(encoded), _bindings()
    with projecting(random_projector("qwen2a")) as projector:
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(projector.pointer, data, len(data), False)
    native = getattr(bitmap, "bitmap", bitmap)
    assert len(heard.samples) == mtmd.mtmd_bitmap_get_n_bytes(native)
    mtmd.mtmd_bitmap_free(native)


@pytest.mark.parametrize("stated", [0, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("before", [b"", b"LIST\x03\0\0\0abc\0"])
def test_a_wav_that_was_written_into_a_pipe_is_heard_to_its_end(stated: int, before: bytes) -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 16_000)
    soundfile.write(file := io.BytesIO(), noise, 16_000, format="WAV")
    whole = file.getvalue()
    at = whole.index(b"data")
    length = stated.to_bytes(4, "little")
    piped = b"RIFF" + length + whole[8:at] + before + b"data" + length + whole[at + 8 :]
    heard = [sounds.decode(encoded, 16_000, 60.0) for encoded in (whole, piped)]
    assert heard[0] == heard[1] and isinstance(heard[0], Sound)


def test_decoded_media_that_wait_are_limited() -> None:
    """The media of a finished request make room for the next ones."""

    class Decoded:
        def decode(self, medium: Medium, sample_rate: int, most_seconds: float) -> Picture:
            return Picture(64, 64, bytes(3 * 64 * 64))

    with projecting(random_projector("gemma3")) as projector:
        reader = MediaReader(projector, cast(Decoder, Decoded()), 512, -MOST_WAITING_TOKENS + 600)
        waiting: list[PromptTokens] = []
        with pytest.raises(QueueFull):
            for number in range(1000):
                prompt = PromptTokens()
                reader.read(Medium("image", bytes([number % 256]), "messages"), prompt, 1000)
                waiting.append(prompt)
        n_tokens = sum(span.n_tokens for prompt in waiting for span in prompt.spans)
        assert 600 <= n_tokens < 600 + waiting[0].spans[0].n_tokens
        counted = PromptTokens(is_counted=True)
        reader.read(Medium("image", b"", "messages"), counted, 1000)
        assert len(counted.ids) > 0 == len(counted.spans), "what is counted does not wait"
        waiting.pop()
        prompt = PromptTokens()
        reader.read(Medium("image", b"", "messages"), prompt, 1000)
        assert prompt.spans
