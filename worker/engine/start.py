"""The start of an engine: everything between the command to load and the first request.

Runs on the main thread of the engine process, which then becomes the engine thread.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from worker.confinement.walls import Walls
from worker.devices import machine, select
from worker.devices.cpu.budget import cpu_budget
from worker.devices.plan import memory
from worker.devices.plan.cells import KvCache, context_options, divided
from worker.devices.plan.placement import load_options
from worker.devices.plan.plan import Plan
from worker.devices.residency import live_check
from worker.devices.residency import proof as residency
from worker.devices.select import Selected, select_device
from worker.engine.cache.binding import open_disk
from worker.engine.intake import Intake
from worker.engine.limits import limits_of, prefill_budget
from worker.engine.loop import Loop
from worker.engine.media.decoder import decoder
from worker.engine.media.reader import MediaReader
from worker.engine.media.start import start_projector
from worker.engine.model_runner import ModelRunner
from worker.engine.outbox import Outbox
from worker.engine.scheduler import Scheduler
from worker.engine.speculation.start import start_guessing
from worker.engine.text.chat_template import ChatTemplate, template_of
from worker.engine.text.prompt import PromptBuilder
from worker.engine.text.renderer import renderer
from worker.engine.threads import ThreadsFollowCpus
from worker.errors import InsufficientVram, ModelError, VramOom, WorkerError
from worker.llama import library, warmup
from worker.llama.constraint import GrammarVocabulary
from worker.llama.context import Context, rows_with_logits
from worker.llama.model import Model
from worker.llama.pooled import PooledContext
from worker.llama.sampler import Sampler
from worker.models.control_vectors import Directions, layers_of, read_directions
from worker.models.gguf.header import GgufHeader, current_header, parts_beside
from worker.models.gguf.servable import check_overridden
from worker.observability.logs import get_logger
from worker.wire.black_box import DRAFT, MODEL, PROJECTOR, BlackBox
from worker.wire.engine_info import ControlInfo, EngineInfo, ModelInfo, named
from worker.wire.engine_settings import EngineSettings
from worker.wire.messages import EngineFailed, LoadModel, Progress
from worker.wire.transport import SyncChannel

log = get_logger()

_PROGRESS_SECONDS = 0.1


def walls_for(config: LoadModel) -> Walls:
    """The walls around an engine that serves this model."""
    settings = config.engine
    files = [part for path in config.paths for part in parts_beside(path)]
    paths = (settings.chat_template, *(each.path for each in settings.control_vectors))
    files += [Path(os.path.expanduser(each)) for each in paths if each is not None]
    store, cache = settings.kv_store, Path(config.driver_cache) if config.driver_cache else None
    folders = [] if store is None else [Path(os.path.expanduser(store))]
    return Walls(settings, files, folders, cache)


def start(
    config: LoadModel, walls: Walls, channel: SyncChannel, black_box: BlackBox
) -> tuple[EngineInfo, Intake, Loop, Outbox]:
    """Plan → load → residency proof → warm-up. Returns what serves requests then.

    Raises:
        WorkerError: the start failed; its exit code becomes the worker's.
    """
    began = time.monotonic()
    channel.send([Progress("preflight", 0.0)])
    settings = config.engine
    header = current_header(config.header, Path(config.model_path))
    header = check_overridden(header, settings.overrides)
    directions = read_directions(settings, header)
    embeds = header.pooling is not None
    budget = cpu_budget(settings.threads)
    log.info(
        "engine.cpu_budget",
        threads=budget.threads,
        derivation=budget.derivation,
        memory_limit_bytes=budget.memory_limit_bytes,
    )
    selected = select_device(settings)
    library.on_abort(partial(report_abort, channel, ModelError, "llama.cpp gave {} up"))
    plan = memory.plan_start(config, header, selected.devices, budget)
    log.info("engine.plan", **plan.as_dict())
    mapped = live_check.MappedFiles(header.parts if settings.maps_file else ())
    model = _load_model(config, channel, selected, plan, header)
    model.directions = directions
    pulse = black_box.pulse_memory(MODEL)
    context = _create_context(config, model, plan, budget.threads, embeds, pulse)
    channel.send([Progress("residency", 0.0)])
    proof = residency.prove(context, selected, header)
    if config.draft is not None:
        channel.send([Progress("draft", 0.0)])
    pulse = black_box.pulse_memory(DRAFT)
    drafter, speculation, proof = start_guessing(
        config, context, proof, selected, plan, header, pulse
    )
    template = template_of(model, settings.chat_template)
    if template is None:
        renderer().close()
    if config.projector is not None:
        channel.send([Progress("projector", 0.0)])
    projector, projector_info, proof = start_projector(
        *(config.projector, model, proof, selected, budget.threads),
        black_box.pulse_memory(PROJECTOR),
    )
    reader = None
    if projector is not None:
        reader = MediaReader(projector, decoder(), context.options.n_ubatch, context.options.n_ctx)
    elif config.projector is not None:
        decoder().close()
    prompts = PromptBuilder(model, template, plan.context_length, embeds=embeds, media=reader)
    pool = PooledContext(context) if embeds else None
    if settings.maps_file:
        library.release_pages()
    channel.send([Progress("warmup", 0.0)])
    warmup.check_directions(context)
    seconds_per_token = 0.0
    if pool is not None:
        pool.warm_up(prompts.build("warm-up"), plan.context_length)
    else:
        seconds_per_token = warmup.warm_up(context)
    findings = machine.findings(budget)  # while its files can still be read
    info = EngineInfo(
        model=_model_info(config, header, model, template, plan.context_length),
        residency=proof,
        backend=settings.backend,
        device=named(selected.names),
        slots=plan.slots,
        batch=context.options.n_batch,
        micro_batch=context.options.n_ubatch,
        prefill_budget=prefill_budget(settings, seconds_per_token),
        threads=budget.threads,
        threads_derivation=budget.derivation,
        cpu_variant=select.cpu_variant(),
        versions=library.versions(),
        build=select.wheel_stamp(),
        plan=plan.parts,
        load_seconds=round(time.monotonic() - began, 3),
        pid=os.getpid(),
        inter_token_target_ms=settings.inter_token_ms,
        device_total_bytes=selected.total_bytes or budget.memory_total_bytes,
        kv_cells=plan.kv_cells,
        kv_unified=plan.kv_unified,
        kv_divisions=plan.kv_divisions,
        kv_reason=plan.kv_reason,
        memory_bytes=plan.memory_bytes,
        kv_store_bytes=None if embeds else settings.kv_store_bytes,
        speculation=speculation,
        projector=projector_info,
        walls=walls.close(),
        findings=findings,
    )
    runner = ModelRunner(model, context, plan.context_length, projector)
    projector_path = Path(config.projector.path) if config.projector is not None else None
    disk = open_disk(header, settings, info, runner.memory_kind, projector_path)
    outbox = Outbox(channel)

    def use_threads(n_threads: int) -> None:
        runner.use_threads(n_threads)
        if drafter is not None:
            drafter.use_threads(n_threads)

    before_step = None
    if budget.cores is not None:
        follows = ThreadsFollowCpus(budget.cores, budget.threads, use_threads, outbox.put)
        before_step = follows.check
    loop = Loop(
        runner,
        Scheduler(*limits_of(info, settings, runner)),
        outbox.put,
        black_box=black_box,
        disk=disk,
        drafter=drafter,
        before_step=before_step,
    )

    def prove_residency() -> None:
        mapped.check()
        live_check.check(selected, info.residency, locked=settings.mlock)

    vocabulary = GrammarVocabulary(model)
    intake = Intake(
        loop,
        prompts,
        channel.send,
        make_sampler=lambda sampling, prompt: Sampler(model, sampling, prompt, vocabulary),
        pool=pool,
        prove_residency=prove_residency,
        kv_unified=info.kv_unified,
        scored_rows=rows_with_logits(model.n_vocab, info.slots),
        takes_snapshots=not runner.memory_kind.cuts_anywhere,
        black_box=black_box,
    )
    library.trim_heap()
    log.info("engine.confined", **{each.name: each.summary for each in info.walls})
    log.info("engine.loaded", device=info.device, seconds=info.load_seconds)
    return info, intake, loop, outbox


def report_abort(channel: SyncChannel, kind: type[WorkerError], what: str, message: str) -> None:
    """Report to the log and the parent why native code aborts this process. A {} in `what` stands
    for the file that it works on."""
    log.error("engine.native_abort", line=message)
    channel.send([EngineFailed(kind(library.sentence_of_abort(what, message)))])


def _load_model(
    config: LoadModel,
    channel: SyncChannel,
    selected: Selected,
    plan: Plan,
    header: GgufHeader,
) -> Model:
    began = last = time.monotonic()

    def progressed(fraction: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PROGRESS_SECONDS or fraction >= 1.0:
            last = now
            total = plan.parts["weights"]
            rate = fraction * total / max(now - began, 1e-3)
            channel.send([Progress("load", round(100 * fraction, 1), rate, total)])

    options = load_options(
        header,
        selected.devices,
        layers=plan.layers,
        mmap=config.engine.maps_file,
        mlock=config.engine.mlock,
        metadata=header.overridden,
        mtp=config.engine.speculate == "mtp" and header.pooling is None,
    )
    model = Model(config.model_path, options, progressed)
    for adapter in config.adapters:
        model.load_adapter(adapter.path)
    return model


def _create_context(
    config: LoadModel,
    model: Model,
    plan: Plan,
    threads: int,
    embeds: bool,
    pulse: memoryview,
) -> Context:
    kv, slots = KvCache(plan.kv_cells, plan.context_length, plan.kv_unified), plan.slots
    if plan.kv_divisions:
        slots = plan.kv_divisions[0]
        kv = divided(plan.kv_cells, slots)
    options = context_options(config.engine, kv, slots=slots, threads=threads, embeds=embeds)
    try:
        return Context(model, options, pulse)
    except VramOom as error:
        raise InsufficientVram(error.message, parts=dict(plan.parts)) from error


def _control_info(
    settings: EngineSettings, header: GgufHeader, directions: Directions | None
) -> ControlInfo | None:
    if directions is None:
        return None
    vectors = tuple(replace(each, path=Path(each.path).name) for each in settings.control_vectors)
    sha256 = hashlib.sha256(directions.tobytes()).hexdigest()
    return ControlInfo(vectors, layers_of(settings, header), sha256)


def _model_info(
    config: LoadModel,
    header: GgufHeader,
    model: Model,
    template: ChatTemplate | None,
    context_length: int,
) -> ModelInfo:
    metadata = header.summary()
    if template is not None:  # the operator's template may replace all of the file's
        metadata["tokenizer.chat_template"] = template.source
        if template.tool_use is None:
            metadata.pop("tokenizer.chat_template.tool_use", None)
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
        bos_token="" if model.bos is None else model.token_text(model.bos),
        eos_token="" if model.eos is None else model.token_text(model.eos),
        eog_token_ids=tuple(sorted(model.eog)),
        has_chat_template=template is not None,
        template_takes_tools=template is not None and template.takes_tools,
        pooling=header.pooling,
        metadata=metadata,
        adapters=config.adapters,
        overridden=header.overridden,
        control=_control_info(config.engine, header, model.directions),
    )
