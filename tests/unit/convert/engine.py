"""Logits and tokens of a GGUF from llama.cpp, for comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.devices.plan.placement import may_repack
from worker.llama import library
from worker.llama.batch import Batch
from worker.llama.context import Context, ContextOptions
from worker.llama.model import LoadOptions, Model
from worker.models.gguf.header import read_header
from worker.wire.adapters import applied

Array = npt.NDArray[np.float32]


def logits(
    gguf: Path,
    tokens: Sequence[int],
    *,
    repacked: bool = False,
    adapter: tuple[Path, float] | None = None,
) -> npt.NDArray[np.float32]:
    """Return one row per token, with the KV cache in F32, without flash attention, with the weights
    as stored or `repacked` as in a worker, and with an adapter at this scale."""

    def read(context: Context) -> npt.NDArray[np.float32]:
        return np.stack([context.logits(row).copy() for row in range(len(tokens))])

    return _decoded(gguf, tokens, read, embeddings=False, repacked=repacked, adapter=adapter)


def embedding(gguf: Path, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the pooled vector of a sequence, with the settings of `logits`."""
    return _decoded(gguf, tokens, lambda context: context.pooled(0))


def ranks(gguf: Path, tokens: Sequence[int], n_labels: int) -> list[float]:
    """Return a reranker's scores of a sequence, one for each label."""

    def read(context: Context) -> npt.NDArray[np.float32]:
        pointer = library.load().llama_get_embeddings_seq(context.pointer, 0)
        return np.ctypeslib.as_array(pointer, (n_labels,)).copy()

    return [float(rank) for rank in _decoded(gguf, tokens, read)]


def answers(gguf: Path, expected: Mapping[str, npt.NDArray[Any]]) -> tuple[Array, Array]:
    """Return the outputs of llama.cpp and of the source's framework for the tokens of a checkpoint
    of `tests/data/parity`: logits, a vector or ranks."""
    tokens = expected["tokens"].tolist()
    if "vector" in expected:
        return embedding(gguf, tokens), expected["vector"]
    if "ranks" in expected:
        wanted = expected["ranks"]
        return np.array(ranks(gguf, tokens, len(wanted)), np.float32), wanted
    return logits(gguf, tokens), expected["logits"]


def _decoded(
    gguf: Path,
    tokens: Sequence[int],
    read: Callable[[Context], npt.NDArray[np.float32]],
    *,
    embeddings: bool = True,
    repacked: bool = False,
    adapter: tuple[Path, float] | None = None,
) -> npt.NDArray[np.float32]:
    repacked = repacked and may_repack(read_header(gguf))
    model = Model(str(gguf), LoadOptions(extra_buffer_types=repacked))
    if adapter is not None:
        model.load_adapter(str(adapter[0]))
    n = len(tokens)
    options = ContextOptions(
        n_ctx=max(n, 64),
        n_batch=n,
        n_ubatch=n,
        kv_types=("f32", "f32"),
        flash_attention="off",
        embeddings=embeddings,
    )
    context = Context(model, options)
    batch = Batch(n)
    if adapter is not None:
        context.apply(applied({0: adapter[1]}))
    try:
        batch.add(0, 0, list(tokens), logits=True)
        batch.want_all_logits()
        assert context.decode(batch) == "ok"
        return read(context)
    finally:
        context.close()
        model.close()


def vocabulary(gguf: Path) -> Model:
    """Load a vocabulary without weights; the caller closes it."""
    return Model(str(gguf), LoadOptions(vocab_only=True))
