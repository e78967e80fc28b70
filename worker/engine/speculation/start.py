"""Chooses the drafter at the engine's start, and loads a draft model or the model's own layers for
multi-token prediction: planned with the model, proven resident like it, warmed up."""

from __future__ import annotations

from pathlib import Path

from worker.devices.plan.cells import draft_options, head_options
from worker.devices.plan.placement import load_options
from worker.devices.plan.plan import Plan
from worker.devices.residency import proof
from worker.devices.select import Selected
from worker.engine.speculation.draft import DraftModel
from worker.engine.speculation.lookup import Lookup
from worker.engine.speculation.mtp import Head
from worker.engine.speculation.speculation import Drafter
from worker.errors import InsufficientVram, VramOom
from worker.llama import library, warmup
from worker.llama.context import Context, ContextOptions
from worker.llama.model import Model
from worker.models.gguf.header import GgufHeader, read_header
from worker.observability.logs import get_logger
from worker.wire.engine_info import DraftInfo, Residency, SpeculationInfo
from worker.wire.engine_settings import EngineSettings
from worker.wire.messages import DraftFile, LoadModel

log = get_logger()


def start_guessing(
    config: LoadModel,
    context: Context,
    residency: Residency,
    selected: Selected,
    plan: Plan,
    header: GgufHeader,
    pulse: memoryview,
) -> tuple[Drafter | None, SpeculationInfo, Residency]:
    """The drafter, what `/info` reports about it, and the residency of the model and the drafter.

    Raises:
        WorkerError: the draft model cannot be loaded, or is not resident on the device.
    """
    wanted = config.engine.speculate
    if wanted == "auto":
        wanted = "draft" if config.draft is not None else "ngram"
    if wanted != "off" and (reason := _why_not(context)):
        if config.engine.speculate != "auto" or config.draft is not None:
            log.warning("engine.speculation_off", reason=reason)
        return None, SpeculationInfo("off", reason), residency
    if wanted == "ngram":
        return Lookup(keeps=config.engine.prefix_cache), SpeculationInfo("ngram"), residency
    settings, threads = config.engine, context.options.threads
    if wanted == "mtp":
        options = head_options(settings, plan.context_length, threads=threads)
        head = _context(context.model, options, pulse, "The model's layers for mtp")
        both = proof.prove(context, selected, header, head)
        warmup.warm_up(head)
        return Head(head, context, keeps=settings.prefix_cache), SpeculationInfo("mtp"), both
    if wanted == "off" or config.draft is None:
        return None, SpeculationInfo("off"), residency
    with library.working_on(f"the draft model {config.draft.path!r}"):
        draft, where = _load(config.draft, settings, selected, plan.context_length, threads, pulse)
    model = draft.model
    info = DraftInfo(
        model_ref=config.draft.model_ref,
        size_bytes=model.size_bytes,
        n_params=model.n_params,
        vocab_size=model.n_vocab,
        context_length=draft.n_ctx,
        layers_total=where.layers_total,
        layers_on_device=where.layers_on_device,
    )
    n_vocab = min(model.n_vocab, context.model.n_vocab)
    drafter = DraftModel(draft, n_vocab, keeps=settings.prefix_cache)
    return drafter, SpeculationInfo("draft", draft=info), proof.together(residency, where)


def _why_not(context: Context) -> str:
    if context.options.embeddings:
        return "the model computes embeddings and generates no text"
    if not context.memory_kind.most_back:
        if context.options.n_back:
            return "llama.cpp cannot remove a guess from this architecture's recurrent memory"
        return "guesses cannot be removed from recurrent memory; see --speculate for exceptions"
    return ""


def _load(
    file: DraftFile,
    settings: EngineSettings,
    selected: Selected,
    context_length: int,
    threads: int,
    pulse: memoryview,
) -> tuple[Context, Residency]:
    header = read_header(Path(file.path))
    selected = selected.first
    mmap, mlock = settings.maps_file, settings.mlock
    model = Model(file.path, load_options(header, selected.devices, mmap=mmap, mlock=mlock))
    length = min(context_length, model.trained_context_length)
    options = draft_options(settings, length, threads=threads)
    context = _context(model, options, pulse, "The draft model")
    where = proof.prove(context, selected, header)
    warmup.warm_up(context)
    return context, where


def _context(model: Model, options: ContextOptions, pulse: memoryview, whose: str) -> Context:
    try:
        return Context(model, options, pulse)
    except VramOom as error:
        raise InsufficientVram(f"{whose}: {error.message}") from error
