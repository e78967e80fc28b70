"""The engine process: its entry point, its start and its threads.

The composition root of this process. The main thread loads the model and then is the engine thread;
another one takes in commands. When the pipe ends the parent is gone, and so are we, at once and
whatever native code is doing.

NOTE: every native computation happens on the main thread. OpenMP keeps a pool of threads for each
thread that computes. With two pools it counts more threads than processors and no longer spins at
its barriers, of which a decode has hundreds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from worker.devices import select
from worker.devices.residency import proof as residency
from worker.engine.backend import LlamaBackend
from worker.engine.cache.disk import Disk
from worker.engine.cache.opening import open_disk
from worker.engine.drafters import start_guessing
from worker.engine.intake import Intake
from worker.engine.limits import limits_of
from worker.engine.loading import cpu_budget_of, create_context, load_model, plan_of
from worker.engine.loop import Loop
from worker.engine.outbox import Outbox
from worker.engine.prompt_scores import rows_at_once
from worker.engine.scheduler import Scheduler
from worker.engine.speculation import Drafter
from worker.engine.text.chat_template import ChatTemplate
from worker.engine.text.model_template import template_metadata, template_of
from worker.engine.text.prompt import PromptBuilder
from worker.errors import BackendMismatch, ModelError, WorkerError
from worker.llama import library, warmup
from worker.llama.constraint import GrammarVocabulary
from worker.llama.context import Context
from worker.llama.model import Model
from worker.llama.pooled import PooledContext
from worker.llama.sampler import Sampler
from worker.models.gguf.header import GgufHeader, current_header
from worker.observability.logs import configure, get_logger
from worker.wire.black_box import BlackBox
from worker.wire.engine_info import EngineInfo, ModelInfo
from worker.wire.engine_settings import EngineSettings
from worker.wire.messages import LoadModel, Progress, Ready, StartFailed, Stop
from worker.wire.transport import SyncChannel

log = get_logger()

_PR_SET_PDEATHSIG = 1
_EXPECTED_WARNINGS = ("training context overflow", "dummy tokens")
"""Warnings for a pool that is larger than one sequence, and for a plan without a vocabulary."""


@dataclass(slots=True)
class Engine:
    """The parts of an engine that has started."""

    settings: EngineSettings
    model: Model
    context: Context
    backend: LlamaBackend
    disk: Disk | None
    prompts: PromptBuilder
    info: EngineInfo
    selected: select.Selected
    drafter: Drafter | None


def main() -> None:
    parser = argparse.ArgumentParser(prog="worker.engine.process")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the parent")
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    # On an abort, ggml would run a debugger first, and the requests in flight would wait for it.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    parser.add_argument("--black-box", type=int, required=True, help="the black box's file")
    options = parser.parse_args()
    channel = SyncChannel(socket.socket(fileno=options.fd))
    with contextlib.suppress(BackendMismatch):  # the start reports it
        library.bindings()
    config = channel.recv()
    if not isinstance(config, LoadModel):
        os._exit(0)  # the parent died before it sent its command
    configure(config.log_level, config.log_format, config.worker_id)
    library.log.listener = _forward_log
    # While the engine loads, nothing reads the pipe. Another thread watches for the parent's end.
    started = threading.Event()
    threading.Thread(target=_watch_parent, args=(started,), daemon=True).start()
    try:
        engine = _start(config, channel)
    except WorkerError as error:
        channel.send([StartFailed(error)])
        os._exit(error.exit_code)
    started.set()
    library.trim_heap()
    library.on_abort(lambda message: log.error("engine.native_abort", line=message))
    gc.collect()
    gc.freeze()  # excludes permanent objects from garbage collection between steps
    _serve(engine, channel, BlackBox(options.black_box))


# --- start -----------------------------------------------------------------------------------


def _start(config: LoadModel, channel: SyncChannel) -> Engine:
    """Preflight → load → residency proof → warm-up.

    Raises:
        WorkerError: the start failed; its exit code becomes the worker's.
    """
    began = time.monotonic()
    channel.send([Progress("preflight", 0.0)])
    settings = config.engine
    header = current_header(config.header, Path(config.model_path))
    budget = cpu_budget_of(settings)
    selected = select.select_device(settings)
    library.on_abort(lambda message: _aborting(message, channel))
    plan = plan_of(config, header, selected, budget)
    log.info("engine.plan", **plan.as_dict())
    model = load_model(config, channel, selected, plan, header)
    embeds = header.pooling is not None
    context = create_context(config, model, plan, budget.threads, embeds)
    channel.send([Progress("residency", 0.0)])
    proof = residency.prove(model, context, selected, header, locked=settings.mlock)
    guessing = start_guessing(config, context, proof, selected, plan, budget.threads)
    template = template_of(model, settings.chat_template)
    prompts = PromptBuilder(model, template, plan.context_length, embeds=embeds)
    channel.send([Progress("warmup", 0.0)])
    if embeds:
        PooledContext(context)([prompts.build("warm-up")])
    else:
        warmup.warm_up(model, context)
    info = EngineInfo(
        model=_model_info(config, header, model, template, plan.context_length),
        residency=guessing.residency,
        backend=settings.backend,
        device=selected.name,
        slots=1 if embeds else settings.slots,
        batch=context.options.n_batch,
        micro_batch=context.options.n_ubatch,
        threads=budget.threads,
        threads_derivation=budget.derivation,
        cpu_variant=selected.cpu_variant,
        versions=library.versions(),
        build=selected.build,
        plan=plan.parts,
        load_seconds=round(time.monotonic() - began, 3),
        pid=os.getpid(),
        inter_token_target_ms=settings.inter_token_ms,
        device_total_bytes=selected.total_bytes or budget.memory_total_bytes,
        kv_cells=plan.kv_cells,
        kv_unified=plan.kv_unified,
        kv_reason=plan.kv_reason,
        memory_bytes=plan.memory_bytes,
        kv_store_bytes=None if embeds else settings.kv_store_bytes,
        speculation=guessing.info,
    )
    backend = LlamaBackend(model, context, plan.context_length)
    disk = open_disk(header, settings, info, backend)
    log.info("engine.loaded", device=selected.name, seconds=info.load_seconds)
    return Engine(
        settings, model, context, backend, disk, prompts, info, selected, guessing.drafter
    )


def _aborting(message: str, channel: SyncChannel) -> None:
    """Tell the parent why native code aborts this process during its start."""
    place, _, reason = message.strip().partition(": ")
    channel.send([StartFailed(ModelError(f"llama.cpp gave the model up: {reason or place}."))])


def _model_info(
    config: LoadModel,
    header: GgufHeader,
    model: Model,
    template: ChatTemplate | None,
    context_length: int,
) -> ModelInfo:
    return ModelInfo(
        name=header.name or config.model_ref,
        architecture=header.architecture,
        quant_kind=header.quant_kind,
        size_bytes=model.size_bytes,
        n_params=model.n_params,
        vocab_size=model.n_vocab,
        tokenizer_kind=header.tokenizer_kind or "none",
        context_length=context_length,
        trained_context_length=model.trained_context_length,
        embedding_length=model.n_embd,
        bos_token_id=model.bos,
        eog_token_ids=tuple(sorted(model.eog)),
        has_chat_template=template is not None,
        template_takes_tools=template is not None and template.takes_tools,
        pooling=header.pooling,
        metadata={**header.summary(), **template_metadata(template)},
        adapter=config.adapter,
    )


# --- serve -----------------------------------------------------------------------------------


def _serve(engine: Engine, channel: SyncChannel, black_box: BlackBox) -> None:
    settings, model, context = engine.settings, engine.model, engine.context
    info = engine.info
    embeds = info.model.pooling is not None
    outbox = Outbox(channel)
    scheduler = Scheduler(limits_of(info, settings, engine.backend))
    loop = Loop(
        engine.backend,
        scheduler,
        outbox.put,
        black_box=black_box,
        disk=engine.disk,
        drafter=engine.drafter,
    )
    vocabulary = GrammarVocabulary(model)
    intake = Intake(
        loop,
        engine.prompts,
        channel.send,
        make_sampler=lambda sampling, prompt: Sampler(model, sampling, prompt, vocabulary),
        pool=PooledContext(context) if embeds else None,
        prove_residency=lambda: residency.prove_again(
            info.residency, engine.selected, locked=settings.mlock
        ),
        kv_unified=info.kv_unified,
        scored_rows=rows_at_once(model.n_vocab, info.slots),
        takes_snapshots=not engine.backend.cuts_anywhere,
        black_box=black_box,
    )
    channel.send([Ready(info), loop.stats()])
    threading.Thread(target=_take_in, args=(channel, intake), name="intake", daemon=True).start()
    _run(loop, outbox)


def _take_in(channel: SyncChannel, intake: Intake) -> None:
    """The intake thread: receive commands until `Stop` or the end of the pipe."""
    try:
        while (command := channel.recv()) is not None and not isinstance(command, Stop):
            intake.handle(command)
    except (BrokenPipeError, ConnectionError):
        pass  # the parent left during a send
    except BaseException:
        log.exception("engine.intake_failed")
        os._exit(70)
    # The system frees what is left.
    os._exit(0)


def _run(loop: Loop, outbox: Outbox) -> None:
    """The engine thread. If the loop fails, the process exits: the black box tells the parent which
    request was in hand, and the other requests go on in the next engine."""
    try:
        loop.run()
    except BaseException:
        log.exception("engine.loop_failed")
        outbox.flush()
        os._exit(70)


# --- the process -----------------------------------------------------------------------------


def _die_with_parent() -> None:
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)  # the parent died between the two calls


def _watch_parent(started: threading.Event) -> None:
    """Exit if the parent dies while the engine loads, for systems where the kernel does not do
    so."""
    parent = os.getppid()
    while not started.wait(1.0):
        if os.getppid() != parent:
            os._exit(0)


def _forward_log(level: library.LogLevel, line: str) -> None:
    """Log llama.cpp's warnings and errors as such, everything else for debugging."""
    is_expected = any(words in line for words in _EXPECTED_WARNINGS)
    told = level in ("warning", "error") and not is_expected
    getattr(log, level if told else "debug")("engine.native", line=line)


if __name__ == "__main__":
    main()
