"""The first steps of a context, before the worker reports that it is ready."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from worker.errors import InsufficientVram, ModelError
from worker.llama.batch import Batch
from worker.llama.context import Context
from worker.wire.messages import DecodeOutcome


def warm_up(context: Context) -> float:
    """Compute a prompt and, on a GPU, one token of every slot. If adapters are loaded, do so with
    all of them, which makes the largest graph, and with none.

    Returns the seconds per prompt token in a full micro-batch on a GPU; 0 on a CPU, where they are
    not measured.

    On a GPU, the prompt is a full micro-batch, the largest step that the engine ever takes. It
    loads kernels and allocates workspaces, so a device that cannot hold them fails now and not
    hours later. On a CPU the prompt is a single token: a CPU allocates nothing during a
    computation, and a full step would take seconds.

    Raises:
        InsufficientVram: the device ran out of memory.
    """
    everything = tuple((number, 1.0) for number in range(len(context.model.adapters)))
    if everything:
        context.apply(everything)
        _warm_up(context)
        context.apply(())
    return _warm_up(context)


def check_directions(context: Context) -> None:
    """Refuse control vectors that change nothing: some graphs of llama.cpp do not add them.

    Raises:
        ModelError: the output is the same with and without them.
    """
    model = context.model
    if model.directions is None or not model.directions.any():
        return
    changed = _output(context)
    context.steer(None)
    plain = _output(context)
    context.steer(model.directions)
    if (changed == plain).all():
        raise ModelError(
            "The control vectors change nothing: llama.cpp does not apply them to the "
            f"architecture {model.metadata('general.architecture')}, or they are too small."
        )


def _output(context: Context) -> npt.NDArray[np.float32]:
    """A copy of the output of a single token."""
    batch = Batch(context.options.n_batch)
    try:
        row = batch.add(0, 0, [context.model.bos or 0], logits=True)
        _check(context.decode(batch))
        if not context.options.embeddings:
            return context.logits(row).copy()
        return context.pooled(0) if context.pools else context.of_tokens(range(1))
    finally:
        context.clear()


def _warm_up(context: Context) -> float:
    options = context.options
    n_per_slot = context.n_ctx if options.kv_unified else context.n_ctx // options.n_seq_max
    n_first = min(options.n_ubatch, options.n_batch, n_per_slot - 1) if options.offload else 1
    batch = Batch(options.n_batch)
    try:
        row = batch.add(0, 0, [context.model.bos or 0] * n_first, logits=True)
        _check(context.decode(batch))
        drawn = int(context.logits(row).argmax())
        if not options.offload:
            return 0.0
        context.clear()  # measure a second pass: the first one also loaded the kernels
        began = time.perf_counter()
        _check(context.decode(batch))
        context.logits(row)  # waits for the device
        seconds = time.perf_counter() - began
        batch.clear()
        for slot in range(min(options.n_seq_max, options.n_batch)):
            row = batch.add(slot, n_first if slot == 0 else 0, [drawn], logits=True)
        _check(context.decode(batch))
        context.logits(row)
        return seconds / n_first
    finally:
        context.clear()


def _check(outcome: DecodeOutcome) -> None:
    if outcome != "ok":
        raise InsufficientVram(
            f"the device cannot compute a full step ({outcome}); lower --micro-batch, --slots "
            "or --context-length"
        )
