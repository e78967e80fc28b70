"""The engine process: its entry point, its start and its two threads.

The composition root of this process, and the only one in this room that knows the rooms `llama`,
`devices` and `models`. The main thread loads the model and then is the engine thread; another one
takes in commands. When the pipe ends the parent is gone, and so are we, at once and whatever native
code is doing.

NOTE: every native computation happens on the main thread. OpenMP keeps a pool of threads for each
thread that computes, and with two pools it counts more threads than processors and stops spinning
at its barriers, of which a decode has hundreds: a third of the speed is lost.
"""

from __future__ import annotations

import argparse
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

from worker.devices import cpu_budget, memory, probe, residency
from worker.engine.chat_template import ChatTemplate
from worker.engine.intake import Intake
from worker.engine.loop import Loop
from worker.engine.outbox import Outbox
from worker.engine.prompt import PromptBuilder
from worker.engine.scheduler import Limits, Scheduler
from worker.engine.transport import SyncChannel
from worker.errors import InferenceFailed, InsufficientVram, VramOom, WorkerError
from worker.llama import library, warmup
from worker.llama.backend import LlamaBackend
from worker.llama.context import Context
from worker.llama.model import LoadOptions, Model
from worker.llama.sampler import Sampler
from worker.messages import EngineConfig, EngineInfo, ModelInfo, Progress, Ready, StartFailed, Stop
from worker.models.gguf import GgufHeader, read_header
from worker.observability.logs import configure, get_logger

log = get_logger()

_PROGRESS_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Engine:
    """What a successful start leaves behind."""

    config: EngineConfig
    model: Model
    context: Context
    backend: LlamaBackend
    prompts: PromptBuilder
    info: EngineInfo
    selected: probe.Selected


def main() -> None:
    parser = argparse.ArgumentParser(prog="worker.engine.process")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the parent")
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we stop
    # On an abort ggml would first run a debugger, while the requests in flight wait for their end.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    channel = SyncChannel(socket.socket(fileno=parser.parse_args().fd))
    config = channel.recv()
    if not isinstance(config, EngineConfig):
        os._exit(0)  # the parent died before it could speak
    configure(config.log_level, config.log_format, config.worker_id)
    library.log.listener = _forward_log
    # While the engine loads nobody else reads the pipe, so its end must be noticed aside.
    started = threading.Event()
    threading.Thread(target=_watch_parent, args=(started,), daemon=True).start()
    try:
        engine = _start(config, channel)
    except WorkerError as error:
        channel.send([StartFailed(error)])
        os._exit(error.exit_code)
    started.set()
    gc.collect()
    gc.freeze()  # what is there now stays for good: no pause between two steps to walk through it
    _serve(engine, channel)


# --- start -----------------------------------------------------------------------------------


def _start(config: EngineConfig, channel: SyncChannel) -> Engine:
    """Preflight → load → residency proof → warm-up.

    Raises:
        WorkerError: with the exit code that the worker then leaves with.
    """
    began = time.monotonic()
    channel.send([Progress("preflight", 0.0)])
    header = read_header(Path(config.model_path))
    budget = cpu_budget.cpu_budget(config.threads)
    log.info(
        "engine.cpu_budget",
        threads=budget.threads,
        derivation=budget.derivation,
        memory_limit_bytes=budget.memory_limit_bytes,
    )
    selected = probe.select_device(config)
    plan = memory.plan(header, config, selected.device, budget)
    log.info("engine.plan", **plan.as_dict())
    model = _load_model(config, channel, selected, plan, header)
    embeds = header.pooling is not None
    context = _create_context(config, model, plan, budget.threads, embeds)
    channel.send([Progress("residency", 0.0)])
    proof = residency.prove(model, context, selected, config)
    template = _chat_template(model)
    prompts = PromptBuilder(model, template, plan.context_length, embeds=embeds)
    channel.send([Progress("warmup", 0.0)])
    if embeds:
        warmup.embed(context, prompts.tokenize("warm-up"))
    else:
        warmup.warm_up(model, context)
    info = EngineInfo(
        model=_model_info(config, header, model, template, plan.context_length),
        residency=proof,
        backend=config.backend,
        device=selected.name,
        slots=1 if embeds else config.slots,
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
    )
    backend = LlamaBackend(model, context, plan.context_length)
    log.info("engine.loaded", device=selected.name, seconds=info.load_seconds)
    return Engine(config, model, context, backend, prompts, info, selected)


def _load_model(
    config: EngineConfig,
    channel: SyncChannel,
    selected: probe.Selected,
    plan: memory.Plan,
    header: GgufHeader,
) -> Model:
    on_gpu = selected.device is not None
    began = last = time.monotonic()

    def progressed(fraction: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PROGRESS_SECONDS or fraction >= 1.0:
            last = now
            rate = fraction * plan.parts["weights"] / max(now - began, 1e-3)
            channel.send([Progress("load", round(100 * fraction, 1), rate)])

    options = LoadOptions(
        device=selected.device,
        mmap=config.mmap if config.mmap is not None else not on_gpu,
        mlock=config.mlock,
        tensor_placement=residency.tensor_placement(selected, header),
    )
    return Model(config.model_path, options, progressed)


def _create_context(
    config: EngineConfig, model: Model, plan: memory.Plan, threads: int, embeds: bool
) -> Context:
    options = memory.context_options(config, plan.context_length, threads=threads, embeds=embeds)
    try:
        return Context(model, options)
    except VramOom as error:
        raise InsufficientVram(error.message, parts=dict(plan.parts)) from error


def _chat_template(model: Model) -> ChatTemplate | None:
    source = model.chat_template()
    if source is None:
        return None
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}
    names |= {"unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
    special = {}
    for name, key in names.items():
        token = model.metadata(f"tokenizer.ggml.{key}")
        special[name] = model.token_text(int(token)) if token is not None else ""
    return ChatTemplate(source, special)


def _model_info(
    config: EngineConfig,
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
        metadata=header.summary(),
    )


# --- serve -----------------------------------------------------------------------------------


def _serve(engine: Engine, channel: SyncChannel) -> None:
    config, model, context = engine.config, engine.model, engine.context
    embeds = engine.info.model.pooling is not None
    limits = Limits(
        n_slots=engine.info.slots,
        n_cells=engine.info.slots * engine.backend.context_length,
        batch=engine.info.batch,
        prefill_alone=max(engine.info.micro_batch, config.prefill_budget),
        prefill_budget=config.prefill_budget,
        prefix_cache=config.prefix_cache and model.can_truncate,
    )
    outbox = Outbox(channel)
    loop = Loop(engine.backend, Scheduler(limits), outbox.put)
    intake = Intake(
        loop,
        engine.prompts,
        channel.send,
        make_sampler=lambda sampling, prompt: Sampler(model, sampling, prompt),
        embed=(lambda tokens: warmup.embed(context, tokens)) if embeds else None,
        prove_residency=lambda: residency.prove_again(
            engine.info.residency, engine.selected, config
        ),
        kv_unified=config.kv_unified,
    )
    channel.send([Ready(engine.info), loop.stats()])
    threading.Thread(target=_take_in, args=(channel, intake), name="intake", daemon=True).start()
    _run(loop, outbox)


def _take_in(channel: SyncChannel, intake: Intake) -> None:
    """The intake thread."""
    try:
        while (command := channel.recv()) is not None and not isinstance(command, Stop):
            intake.handle(command)
    except (BrokenPipeError, ConnectionError):
        pass  # the parent has gone while we answered
    except BaseException:
        log.exception("engine.intake_failed")
        os._exit(70)
    # Nothing to tidy: the parent has what it wanted, and the system frees the rest.
    os._exit(0)


def _run(loop: Loop, outbox: Outbox) -> None:
    """The engine thread. A loop that breaks takes the process with it: the parent tells the
    requests in flight and starts another one."""
    try:
        loop.run()
    except BaseException:
        log.exception("engine.loop_failed")
        try:
            loop.fail_all(InferenceFailed("the engine met an error of its own"))
            outbox.flush()
        finally:
            os._exit(70)


# --- the process -----------------------------------------------------------------------------


def _die_with_parent() -> None:
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)  # it died between the two calls


def _watch_parent(started: threading.Event) -> None:
    """While the engine loads: leave when the parent has gone (where the kernel does not do it)."""
    parent = os.getppid()
    while not started.wait(1.0):
        if os.getppid() != parent:
            os._exit(0)


def _forward_log(level: library.LogLevel, line: str) -> None:
    """llama.cpp's warnings are ours; the rest of its talk is for debugging."""
    getattr(log, level if level in ("warning", "error") else "debug")("engine.native", line=line)


if __name__ == "__main__":
    main()
