"""The conversion from beginning to end: check everything, write, read back, name the file.

Runs on the main thread of the converter's own process; the chunks of the weights are worked on by
a few threads (`chunks`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.convert import architectures, chunks, pre_tokenizers, token_check, verify
from worker.convert.architectures import Family, Metadata
from worker.convert.checkpoint import Checkpoint
from worker.convert.config import Config
from worker.convert.output import OutputFile, sizes
from worker.convert.plan import OutputTensor, plan
from worker.convert.progress import Reporter
from worker.convert.quantize import OutType, TensorType, encode, tensor_type
from worker.convert.special_tokens import chat_templates, special_tokens
from worker.convert.tokenizer import read_vocabulary
from worker.convert.vocabulary import Vocabulary
from worker.errors import ModelError

FILE_TYPES: dict[OutType, int] = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
"""`general.file_type`."""


@dataclass(frozen=True, slots=True)
class Options:
    outtype: OutType = "q8_0"
    pre_tokenizer: str | None = None
    """Overrides what `tokenizer.json` defines."""
    name: str | None = None
    """`general.name`; the folder's by default."""
    n_threads: int | None = None


@dataclass(slots=True)
class Job:
    """A checkpoint that was understood: everything but the weights has been read and checked."""

    checkpoint: Checkpoint
    architecture: str
    metadata: Metadata
    chat_template: str | list[dict[str, str]] | None
    tensors: list[tuple[OutputTensor, TensorType]]
    vocabulary: Vocabulary
    notes: list[str]
    """Where llama.cpp is known to behave otherwise than the source's own framework."""


def convert(source: Path, destination: Path, options: Options, report: Reporter) -> dict[str, Any]:
    """Write `destination` from the checkpoint in the folder `source`.

    Returns what `Reporter.finished` shows. Raises `ModelError`, leaving nothing behind.
    """
    began = time.monotonic()
    if destination.is_dir():
        raise ModelError(f"{destination} is a folder; name the GGUF file to write")
    report.step("check", 0, 1)
    job = prepare(source, options)
    try:
        token_check.check(source, job.architecture, job.metadata)
        for sentence in job.notes:
            report.note(sentence)
        _check_space(destination, job)
        size = _write(job, destination, options, report)
    finally:
        job.checkpoint.close()
    return {
        "path": str(destination),
        "outtype": options.outtype,
        "architecture": job.architecture,
        "n_tensors": len(job.tensors),
        "size_bytes": size,
        "seconds": round(time.monotonic() - began, 3),
    }


def prepare(source: Path, options: Options) -> Job:
    """Everything that can be refused before a weight is read."""
    checkpoint = Checkpoint.open(source)
    config = Config(checkpoint.config)
    family = architectures.family_of(config)
    if family.section:
        config = config.section(family.section)
    dims = family.dims(config)
    family.check(config, dims)
    tensors = [
        (t, tensor_type(options.outtype, t.shape, t.keep_f32))
        for t in plan(checkpoint, family, config, dims)
    ]
    vocabulary = read_vocabulary(checkpoint, dims.n_vocab, options.pre_tokenizer)
    metadata: Metadata = {
        "general.type": "model",
        "general.name": _safe_name(options.name or _default_name(checkpoint), vocabulary),
        "general.file_type": FILE_TYPES[options.outtype],
        "general.quantization_version": 2,
        **family.metadata(config, dims),
        **vocabulary.metadata(),
        **special_tokens(checkpoint, vocabulary),
    }
    template = chat_templates(checkpoint)
    checkpoint.forget_json()
    notes = [*_notes(family, config, vocabulary)]
    return Job(checkpoint, family.architecture, metadata, template, tensors, vocabulary, notes)


def _notes(family: Family, config: Config, vocabulary: Vocabulary) -> Iterator[str]:
    if pre_tokenizers.splits_marks(vocabulary.pre):
        yield (
            f"note: llama.cpp's {vocabulary.pre} pre-tokenizer splits words at combining marks "
            "(Devanagari, Bengali…) where this tokenizer does not"
        )
    window = config.values.get("sliding_window")
    if family.ignores_window and isinstance(window, int) and window > 0:
        if window < config.integer("max_position_embeddings"):
            yield f"note: llama.cpp attends to the whole context, not to a window of {window}"


def _write(job: Job, destination: Path, options: Options, report: Reporter) -> int:
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{destination.parent} cannot be made: {error.strerror}") from None
    with OutputFile(destination) as out:
        out.write_header(job.architecture, job.metadata, job.tensors, job.chat_template)
        total = sum(p.size_bytes for p in out.placed)

        def convert_chunk(chunk: chunks.Chunk) -> None:
            tensor = chunk.placed.tensor
            if chunk.piece is None:
                assert tensor.values is not None
                values: Any = tensor.values
            else:
                values = chunk.piece.read(job.checkpoint, chunk.first_row, chunk.n_rows)
            out.write(encode(values, chunk.placed.kind, tensor.plus), chunk.offset)

        def check_chunk(chunk: chunks.Chunk) -> None:
            verify.check_chunk(job.checkpoint, out.read, chunk)

        for phase, work in (("convert", convert_chunk), ("verify", check_chunk)):
            report.step(phase, 0, total)
            chunks.run(
                work,
                chunks.chunks(out.placed),
                lambda done, phase=phase: report.step(phase, done, total),  # type: ignore[misc]
                options.n_threads,
            )
            out.flush()
        out.seal()
        out.commit()
    return destination.stat().st_size


def _check_space(destination: Path, job: Job) -> None:
    needed = sum(sizes(job.tensors).values())
    folder = destination.parent
    while not folder.exists():
        folder = folder.parent
    stats = os.statvfs(folder)
    available = stats.f_bavail * stats.f_frsize
    if available < needed:
        raise ModelError(
            f"{folder} has {available:,} bytes free, {destination.name} needs {needed:,}",
            needed_bytes=needed,
            available_bytes=available,
        )


def _default_name(checkpoint: Checkpoint) -> str:
    name = checkpoint.config.get("_name_or_path")
    return Path(name).name if isinstance(name, str) and name else checkpoint.folder.resolve().name


def _safe_name(name: str, vocabulary: Vocabulary) -> str:
    """By "phi-3" in the name llama.cpp decides that special tokens swallow the spaces behind them,
    and then it takes some tokens for granted."""
    taken_for_granted = {"</s>", "<unk>", "<s>", "<|endoftext|>"}
    if vocabulary.eats_spaces_behind and taken_for_granted <= set(vocabulary.tokens):
        return name if re.search(r"(?i)phi-?3", name) else f"{name} (Phi-3 tokens)"
    return re.sub(r"(?i)phi-?(3)", r"phi \1", name)
