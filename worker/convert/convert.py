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

from worker.convert import (
    architectures,
    chunks,
    k_quants,
    manifest,
    pre_tokenizers,
    token_check,
    verify,
)
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
from worker.models.gguf import read_header
from worker.models.hub_cache import name_of

FILE_TYPES: dict[str, int] = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32, **k_quants.FILE_TYPES}
"""`general.file_type` of each output type."""

_HEADROOM_BYTES = 64 << 20
"""For the vocabulary in the header."""


@dataclass(frozen=True, slots=True)
class Options:
    outtype: str = "q8_0"
    pre_tokenizer: str | None = None
    """Overrides what `tokenizer.json` defines."""
    name: str | None = None
    """`general.name`; the folder's by default."""
    imatrix: Path | None = None
    """Importance matrix for the types that llama.cpp's quantiser makes."""
    n_threads: int | None = None

    @property
    def is_quantised_after(self) -> bool:
        """Written to an intermediate file first, which llama.cpp then quantises."""
        return self.outtype in k_quants.FILE_TYPES


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
    job = _understood(source, options)
    try:
        for sentence in job.notes:
            report.note(sentence)
        _check_space(destination, job, options)
        digest = _write(job, destination, options, report, manifest.Hashing(source))
    finally:
        job.checkpoint.close()
    return {
        "path": str(destination),
        "outtype": options.outtype,
        "architecture": job.architecture,
        "n_tensors": len(job.tensors),
        "size_bytes": destination.stat().st_size,
        "source_sha256": digest,
        "seconds": round(time.monotonic() - began, 3),
    }


def _understood(source: Path, options: Options) -> Job:
    """`prepare`, with the tokenizer held against its source's own."""
    with token_check.TokenCheck(source) as tokens:
        job = prepare(source, options)
        try:
            tokens.check(job.architecture, job.metadata)
        except BaseException:
            job.checkpoint.close()
            raise
    return job


def prepare(source: Path, options: Options) -> Job:
    """Everything that the source's small files and its headers can be refused for."""
    checkpoint = Checkpoint.open(source)
    config = Config(checkpoint.config)
    family = architectures.family_of(config)
    if family.section:
        config = config.section(family.section)
    dims = family.dims(config)
    family.check(config, dims)
    planned = plan(checkpoint, family, config, dims)
    written = _lossless(checkpoint) if options.is_quantised_after else options.outtype
    tensors = [(t, tensor_type(written, t.shape, t.keep_f32)) for t in planned]
    vocabulary = read_vocabulary(checkpoint, dims.n_vocab, options.pre_tokenizer)
    metadata: Metadata = {
        "general.type": "model",
        "general.name": _safe_name(options.name or name_of(source), vocabulary),
        "general.file_type": FILE_TYPES[options.outtype],
        "general.quantization_version": 2,
        # In front of the vocabulary, where the digest is found again in time.
        **manifest.describe(source, options.outtype, options.name),
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


def _write(
    job: Job, destination: Path, options: Options, report: Reporter, hashing: manifest.Hashing
) -> str:
    """Returns the digest of the source."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{destination.parent} cannot be made: {error.strerror}") from None
    with OutputFile(destination) as out:
        if options.is_quantised_after:
            _write_quantised(job, out, options, report)
        else:
            _write_tensors(job, out, options, report)
        verify.check_file(
            job.checkpoint,
            [tensor for tensor, _ in job.tensors],
            out.partial,
            lambda done, total: report.step("verify", done, total),
            options.n_threads,
        )
        digest = hashing.result()
        out.patch(manifest.PLACEHOLDER, digest)
        out.commit()
    return digest


def _write_tensors(job: Job, out: OutputFile, options: Options, report: Reporter) -> None:
    out.write_header(job.architecture, job.metadata, job.tensors, job.chat_template)
    total = sum(p.size_bytes for p in out.placed)

    def work(chunk: chunks.Chunk) -> None:
        placed = chunk.placed
        values = chunk.source(job.checkpoint)
        out.write(encode(values, placed.kind, placed.tensor.plus), chunk.offset)

    report.step("convert", 0, total)
    chunks.run(
        work,
        chunks.chunks(out.placed),
        lambda done: report.step("convert", done, total),
        options.n_threads,
    )
    out.seal()


def _write_quantised(job: Job, out: OutputFile, options: Options, report: Reporter) -> None:
    path = out.path.with_name(out.path.name + ".intermediate")
    with OutputFile(path, is_read_next=True) as intermediate:
        _write_tensors(job, intermediate, options, report)
        size = sum(p.size_bytes for p in intermediate.placed)
        report.step("quantize", 0, size)
        k_quants.quantize(
            intermediate.partial,
            out.partial,
            options.outtype,
            options.imatrix,
            options.n_threads,
            lambda done, total: report.step("quantize", size * done // total, size),
        )


def _lossless(checkpoint: Checkpoint) -> OutType:
    """The type that holds every value of the source."""
    types = {info.dtype for info in checkpoint.tensors.values()}
    if len(types) > 1:
        return "f32"
    kinds: dict[str, OutType] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
    return kinds[types.pop()]


def _check_space(destination: Path, job: Job, options: Options) -> None:
    needed = sum(sizes(job.tensors).values()) + _HEADROOM_BYTES
    if options.is_quantised_after:
        weights = sum(tensor.n_elements for tensor, _ in job.tensors)
        needed += int(weights * k_quants.BITS_PER_WEIGHT[options.outtype] / 8)
    folder = destination.absolute().parent
    while not folder.exists():
        folder = folder.parent
    stats = os.statvfs(folder)
    available = stats.f_bavail * stats.f_frsize
    if available < needed:
        raise ModelError(
            f"{folder} has {available:,} bytes free, converting to {destination.name} "
            f"needs {needed:,}",
            needed_bytes=needed,
            available_bytes=available,
        )


def verify_existing(source: Path, file: Path, report: Reporter) -> int:
    """Repeat every check on a file that was written before; returns the number of tensors.

    Raises:
        ModelError: the file is not what the source gives.
    """
    written = read_header(file)
    job = _understood(source, Options())
    try:
        tensors = [tensor for tensor, _ in job.tensors]
        verify.check_file(
            job.checkpoint, tensors, file, lambda done, total: report.step("verify", done, total)
        )
    finally:
        job.checkpoint.close()
    recorded = written.metadata.get(manifest.DIGEST)
    if recorded is not None and recorded != manifest.digest(source):
        raise ModelError(f"{file} was made of other files than those in {source}")
    return len(tensors)


def _safe_name(name: str, vocabulary: Vocabulary) -> str:
    """By "phi-3" in the name llama.cpp decides that special tokens swallow the spaces behind them,
    and then it takes some tokens for granted."""
    taken_for_granted = {"</s>", "<unk>", "<s>", "<|endoftext|>"}
    if vocabulary.eats_spaces_behind and taken_for_granted <= set(vocabulary.tokens):
        return name if re.search(r"(?i)phi-?3", name) else f"{name} (Phi-3 tokens)"
    return re.sub(r"(?i)phi-?(3)", r"phi \1", name)
