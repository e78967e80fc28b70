"""The memory plan before the load: what the model will need, and whether the device has it.

No weight is read. Tensor sizes come from the header, and llama.cpp itself lays out the KV cache and
the compute graph of a model that it loads without allocating (`no_alloc`). Runs in the engine
process before the load, and in a process of its own for the `plan` command.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache

from worker.devices.cpu.budget import CpuBudget
from worker.devices.plan import placement
from worker.devices.plan.cells import (
    CELLS_STEP,
    LARGEST_SHARE,
    STATES_AHEAD,
    STATES_AT_ONCE,
    KvCache,
    a_part_each,
    context_options,
    divided,
    divisions_of,
    draft_options,
    head_options,
)
from worker.devices.plan.placement import Devices, largest, shared_out
from worker.devices.plan.plan import Plan, Share
from worker.devices.plan.projector import EMBEDDINGS_BYTES, device_bytes
from worker.devices.plan.unloaded import Layout, Unloaded
from worker.errors import ConfigError, InsufficientVram, ModelError, wrong_value
from worker.llama import library
from worker.models.gguf.constants import constants
from worker.models.gguf.header import GgufHeader, read_header
from worker.models.gguf.tensors import tensor_types
from worker.wire.backends import BACKENDS
from worker.wire.engine_settings import EngineSettings
from worker.wire.messages import LoadModel

_MIB = 1 << 20
_FLOAT_BYTES = 4
_EXACT_CELLS = 1 << 21
"""A context with up to this many KV cells is laid out exactly; a larger one is extrapolated."""
_AUTOMATIC_SHARE = 0.5
"""A default KV cache may use this share of what the rest of the plan leaves. On a GPU with memory
of its own, one sequence of the trained length may use all of it."""
_HOST_LENGTH = 16384
"""A default KV cache in the host's memory holds one sequence of the trained length, or of this
length if that is shorter."""
_HOST_BYTES = 128 * _MIB
"""It holds more, up to one sequence for each slot, while it takes no more than these bytes."""
_STATES_SHARE, _MOST_STATES_BYTES = 0.25, 8 << 30
"""By default, saved states of prompts get this share of the host's remaining memory, up to these
bytes."""
_SNAPSHOT_BYTES = 256 * _MIB
"""The least for saved states if the model's memory is recurrent or windowed."""
_HEAD = ".nextn.eh_proj.weight"
"""The end of the name of a tensor that every layer for multi-token prediction has."""
_POSITIONS = "position_embd.weight"
"""The tensor with a row for each position that the model knows. llama.cpp ends the process if it
looks up a position beyond them."""
_ANY_CELLS = 1 << 40
_MOST_CELLS = 1 << 20
"""The most cells by default, unless one sequence of the trained length needs more."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to plan for: a model, what is loaded beside it, and where."""

    header: GgufHeader
    settings: EngineSettings
    devices: Devices
    budget: CpuBudget
    model_ref: str
    """The model's name in the plan."""
    adapters: tuple[GgufHeader, ...] = ()
    """LoRA adapters, whose tensors are beside the weights."""
    draft: GgufHeader | None = None
    projector: GgufHeader | None = None
    """What turns pictures and sounds into embeddings."""


def plan(request: PlanRequest) -> Plan:
    """Plan the model's memory and its context length.

    Raises:
        InsufficientVram: it does not fit; `details` has needed and available bytes by part and the
            largest `--context-length` and `--slots` that would fit.
        ConfigError: the model cannot run with these settings.
        ModelError: llama.cpp refuses the file.
    """
    with closing(_Planner(request)) as planner:
        return planner.plan()


def plan_start(load: LoadModel, header: GgufHeader, devices: Devices, budget: CpuBudget) -> Plan:
    """Plan the start of a model with this header. Raises what `plan` raises."""
    adapters = tuple(read_header(adapter.path) for adapter in load.adapters)
    draft, projector = (
        read_header(each.path) if each is not None else None
        for each in (load.draft, load.projector)
    )
    return plan(
        PlanRequest(
            header, load.engine, devices, budget, load.model_ref, adapters, draft, projector
        )
    )


class _Planner:
    def __init__(self, request: PlanRequest) -> None:
        header, settings, devices = request.header, request.settings, request.devices
        self._embeds = header.pooling is not None
        if self._embeds:  # all texts of a decode share the cells of one
            settings = replace(settings, slots=1, kv_unified=None)
        self._settings = settings
        self._devices, self._budget, self._model_ref = devices, request.budget, request.model_ref
        self._learns_positions = any(each.name == _POSITIONS for each in header.tensors)
        self._lengths_differ = header.lengths_differ
        self._names = [device.name for device in devices] or ["CPU"]
        self._is_gpus_own = bool(devices) and not any(each.uses_host_memory for each in devices)
        """Whether the model is in memory that only GPUs use."""
        self._available = self._available_bytes()
        self._margin = BACKENDS[settings.backend].margin_bytes
        self._unpacks = any(device.registry == "Vulkan" for device in devices)
        self._layers: tuple[int, ...] = ()
        if len(devices) > 1:
            left = [max(available - self._margin, 1) for available in self._available]
            self._layers = shared_out(header, left)
        self._has_head = settings.speculate == "mtp" and not self._embeds
        if self._has_head and not any(each.name.endswith(_HEAD) for each in header.tensors):
            why = (
                f"but {self._model_ref} has no layers for multi-token prediction; use a file that "
                "has some (blk.*.nextn.*), or another --speculate"
            )
            raise wrong_value("speculate", settings.speculate, why)
        self._model = Unloaded(header, devices, self._layers, mtp=self._has_head)
        layers = self._layers or (1,)
        added_bytes = sum(adapter.size_bytes for adapter in request.adapters)
        self._adapted_bytes = max(
            (_adapted_bytes(each, header) for each in request.adapters), default=0
        )
        if settings.control_vector:
            added_bytes += _FLOAT_BYTES * (header.embedding_length or 0) * (header.block_count or 0)
        adapter = [added_bytes * n // sum(layers) for n in layers]
        self._weight_bytes = tuple(map(sum, zip(self._model.weight_bytes, adapter, strict=True)))
        self._draft: Unloaded | None = None
        if request.draft is not None and not self._embeds:
            with library.working_on(f"the draft model {str(request.draft.path)!r}"):
                self._draft = Unloaded(request.draft, devices[:1], role="draft model")
        self._draft_bytes = cache(self._size_draft if self._draft is not None else self._size_head)
        self._projector = request.projector if not self._embeds else None
        self._layout = cache(self._lay_out)
        self._most_cells = self._addressable_cells()

    def close(self) -> None:
        self._model.close()
        if self._draft is not None:
            self._draft.close()

    def plan(self) -> Plan:
        length, cells = self._settings.context_length, self._settings.kv_cells
        known = self._model.trained_context_length
        if self._learns_positions and (length or 0) > known:
            why = f"but {self._model_ref} has learned only {known} positions"
            raise wrong_value("context_length", length, why)
        if cells is None and (length is not None or self._embeds):  # tokens for each slot
            wanted = length or self._model.trained_context_length
            slots = self._settings.slots
            plan = self._fitted(wanted, lambda n: self._plan_at(n, slots), length is not None)
        else:  # cells for all slots together
            wanted = cells or self._default_cells()
            plan = self._fitted(
                wanted, lambda n: self._plan_with(self._shared_out(n)), cells is not None
            )
        return _with_divisions(self._with_states(self._with_host_room(plan)))

    def _fitted(self, wanted: int, plan_of: Callable[[int], Plan], is_chosen: bool) -> Plan:
        """The plan for `wanted`; if that is a default and does not fit, the largest that fits."""
        plan = plan_of(wanted)
        if is_chosen and plan.kv_cells > self._most_cells:
            raise ConfigError(
                f"{plan.kv_cells:,} KV cells are more than {', '.join(self._names)} can address: "
                f"--slots × --context-length, or --kv-cells, may be {self._most_cells:,} at most.",
                field="kv_cells" if self._settings.kv_cells else "context_length",
            )
        if plan.fits and (is_chosen or self._leaves_room(plan)):
            return plan
        if is_chosen:
            raise self._too_large(plan)

        def most_cells(most: int, is_good: Callable[[Plan], bool]) -> int:
            return CELLS_STEP * largest(
                most // CELLS_STEP, lambda n: is_good(plan_of(n * CELLS_STEP))
            )

        found = most_cells(wanted, lambda plan: plan.fits and self._leaves_room(plan))
        least = 0 if found else wanted
        if self._is_gpus_own:  # one sequence may take more than a default share of the memory
            least = max(least, min(self._model.trained_context_length, wanted))
        if found < least:
            found = max(found, most_cells(least, lambda plan: plan.fits))
        if not found:
            shortest = min(CELLS_STEP, self._model.trained_context_length)
            raise self._too_large(self._plan_at(shortest, self._settings.slots))
        return replace(plan_of(found), capped=True)

    def _default_cells(self) -> int:
        trained, slots = self._model.trained_context_length, self._settings.slots
        if self._is_gpus_own:
            return min(slots * trained, max(trained, _MOST_CELLS), self._most_cells)
        few, many = (sum(self._layout(n, slots, True).kv) for n in (1 << 13, 1 << 14))
        for_all = slots * trained
        if many > few:
            for_all = min(
                for_all, _HOST_BYTES * (1 << 13) // (many - few) // CELLS_STEP * CELLS_STEP
            )
        return max(min(trained, _HOST_LENGTH), min(for_all, _MOST_CELLS))

    def _shared_out(self, cells: int) -> KvCache:
        """A part of the cells for each slot if the parts are long enough; otherwise one pool."""
        settings, slots = self._settings, self._settings.slots
        length = settings.context_length or min(self._model.trained_context_length, cells)
        unified = settings.kv_unified
        most = cells // slots if unified is False else cells
        if settings.context_length and length > most:
            of_each = f" divided by --slots ({slots})" if unified is False else ""
            why = f"which is more than --kv-cells ({cells}){of_each}; it may be {most} at most"
            raise wrong_value("context_length", length, why)
        # If all memory is recurrent, a sequence has one state, however long it is.
        if slots * length > cells and not self._layout(cells, slots, True).largest_kv:
            return a_part_each(settings, length)
        if unified is None:
            unified = slots * length > cells
        elif not unified and slots * length > cells:
            length = max(cells // slots // CELLS_STEP * CELLS_STEP, min(CELLS_STEP, length))
        if not unified:
            parts = a_part_each(replace(settings, kv_unified=False), length)
            if settings.kv_cells is None or parts.cells >= cells:
                return parts
            return replace(parts, reason=f"{parts.reason}; the rest of {cells:,} would lie idle")
        cells = -(-cells // CELLS_STEP) * CELLS_STEP  # as llama.cpp does, so that the plan is exact
        reason = f"{cells:,} cells in one pool, of which a sequence may have {length:,}"
        divisions = divisions_of(cells, slots) if settings.kv_unified is None else ()
        return KvCache(cells, length, True, reason, divisions)

    def _with_host_room(self, plan: Plan) -> Plan:
        """Check that the host has the memory that a GPU worker needs there."""
        if not self._devices:
            return plan
        host_bytes, available = sum(plan.host_parts.values()), self._host_bytes_beside(plan)
        if host_bytes > available:
            raise InsufficientVram(
                f"{host_bytes:,} bytes of the host's memory are needed beside "
                f"{', '.join(share.device for share in plan.shares)}, "
                f"{available:,} are available.",
                **plan.as_dict() | {"needed_bytes": host_bytes, "available_bytes": available},
            )
        return plan

    def _host_bytes_beside(self, plan: Plan) -> int:
        """What the host has left beside the GPUs' parts, which may be in the same memory."""
        shares = zip(self._devices, plan.shares, strict=False)  # a CPU is not among the devices
        taken = sum(share.needed_bytes for device, share in shares if device.uses_host_memory)
        return self._budget.memory_available_bytes - taken

    def _with_states(self, plan: Plan) -> Plan:
        """Give saved states of prompts their part of the host's remaining memory."""
        if self._embeds:
            return plan
        parts = plan.host_parts if self._devices else plan.parts
        least, chosen = parts.get("states", 0), self._settings.snapshot_mib
        left = self._host_bytes_beside(plan) - sum(parts.values())
        if chosen is None:
            most, left = _MOST_STATES_BYTES, int(left * _STATES_SHARE)
        else:
            most = chosen * _MIB
        parts = {**parts, "states": least + max(min(left, most - least), 0)}
        if self._devices:
            return replace(plan, host_parts=parts)
        [share] = plan.shares
        return replace(plan, shares=(replace(share, parts=parts),))

    def _plan_at(self, context_length: int, slots: int) -> Plan:
        settings = replace(self._settings, slots=slots)
        return self._plan_with(a_part_each(settings, context_length), slots)

    def _plan_with(self, kv: KvCache, slots: int | None = None) -> Plan:
        slots = slots or self._settings.slots
        cells = kv.context_length if self._embeds else kv.cells
        layout = self._layout(cells, slots, kv.unified)
        if not layout.largest_kv:
            tokens = f"{slots} slot{'s' * (slots > 1)} × {kv.context_length:,} tokens"
            kv = replace(kv, reason=f"{tokens}, which take no cells")
        divisions = (
            kv.divisions if layout.memory_kind.moves_states and not self._lengths_differ else ()
        )
        layouts = [layout, *(self._layout(divided(cells, n).cells, n, False) for n in divisions)]
        layout = replace(
            layout,
            compute=tuple(map(max, zip(*(each.compute for each in layouts), strict=True))),
            host_compute=max(each.host_compute for each in layouts),
        )
        on_devices, on_host = self._parts(layout, kv, slots)
        if not self._devices:  # everything is in memory
            [parts] = on_devices
            parts |= {name: parts.get(name, 0) + size for name, size in on_host.items()}
            on_host = {}
        return Plan(
            model=self._model_ref,
            shares=tuple(
                Share(device=name, available_bytes=available, parts=parts)
                for name, available, parts in zip(
                    self._names, self._available, on_devices, strict=True
                )
            ),
            layers=self._layers,
            host_parts=on_host,
            context_length=kv.context_length,
            trained_context_length=self._model.trained_context_length,
            slots=slots,
            kv_cells=kv.cells,
            kv_unified=kv.unified,
            kv_divisions=divisions,
            kv_reason=kv.reason,
        )

    def _parts(
        self, layout: Layout, kv: KvCache, slots: int
    ) -> tuple[list[dict[str, int]], dict[str, int]]:
        """Bytes by part on each device, or in memory, and on the host beside it."""
        margin = self._margin + self._unpacked_bytes(layout)
        if self._embeds:  # kernels convert a tensor of a long text to a type of half the size
            margin += max(layout.compute) // 2
        on_devices = [
            {"weights": weights, "kv": cached, "compute": compute, "output": 0, "margin": margin}
            for weights, cached, compute in zip(
                self._weight_bytes, layout.kv, layout.compute, strict=True
            )
        ]
        on_host = {
            "weights": self._model.weights.host_bytes,
            "compute": layout.host_compute,
            "output": layout.output,
        }
        if self._settings.prefix_cache and not layout.memory_kind.cuts_anywhere:
            chosen = self._settings.snapshot_mib
            on_host["states"] = _SNAPSHOT_BYTES if chosen is None else chosen * _MIB
        store_bytes = self._settings.kv_store_bytes
        if store_bytes is not None and not self._embeds:
            of_one = sum(layout.kv) // (1 if kv.unified else slots)
            on_host["kv_store"] = STATES_AT_ONCE * min(of_one, store_bytes // LARGEST_SHARE)
        if (self._draft is not None or self._has_head) and layout.memory_kind.most_back:
            of_draft, on_host["draft"] = self._draft_bytes(kv.context_length)
            for parts, n_bytes in zip(on_devices, of_draft, strict=False):
                parts["draft"] = n_bytes
        if self._projector is not None:
            on_devices[0]["projector"] = device_bytes(self._projector, kv.context_length)
            on_host["embeddings"] = EMBEDDINGS_BYTES
        return on_devices, on_host

    def _unpacked_bytes(self, layout: Layout) -> int:
        """What ggml's Vulkan takes once a prompt attends to quantised cells: the keys and values of
        one layer as 16-bit floats. CUDA has room for them in its compute buffer."""
        numbers = library.type_numbers()
        types = [tensor_types()[numbers[each.upper()]] for each in self._settings.kv_types]
        if not self._unpacks or any(elements == 1 for _, elements, _ in types):
            return 0
        of_element = max(n_bytes / elements for _, elements, n_bytes in types)
        return round(2 * 2 * layout.largest_kv / of_element)

    def _size_head(self, context_length: int) -> tuple[tuple[int, ...], int]:
        """Bytes that the layers for multi-token prediction take beside their weights, on each
        device and on the host."""
        options = head_options(self._settings, context_length, threads=1)
        layout = self._model.lay_out(options)
        states = _FLOAT_BYTES * self._model.n_embd * (options.n_ubatch + STATES_AHEAD)
        on_devices = tuple(map(sum, zip(layout.kv, layout.compute, strict=True)))
        return on_devices, layout.host_compute + layout.output + states

    def _size_draft(self, context_length: int) -> tuple[tuple[int, ...], int]:
        """Bytes of the draft model on the first device and on the host.

        Raises:
            ModelError: its memory cannot be cut back.
        """
        draft = self._draft
        assert draft is not None
        length = min(context_length, draft.trained_context_length)
        with library.working_on(f"the draft model {draft.path!r}"):
            layout = draft.lay_out(draft_options(self._settings, length, threads=1))
        if not layout.memory_kind.cuts_anywhere:
            raise ModelError(
                f"The draft model {draft.path!r} cannot guess: its memory is recurrent or "
                "windowed, so a wrong guess could not be taken out of it. Use one whose layers "
                "all keep every token.",
                path=draft.path,
            )
        on_host = draft.weights.host_bytes + layout.host_compute + layout.output
        return (sum(draft.weight_bytes + layout.kv + layout.compute),), on_host

    def _lay_out(self, cells: int, slots: int, unified: bool) -> Layout:
        exact = min(_EXACT_CELLS, self._most_cells)
        if cells <= exact:
            length = cells if unified or self._embeds else cells // slots
            kv = KvCache(cells, length, unified)
            settings = replace(self._settings, slots=slots)
            options = context_options(settings, kv, threads=1, embeds=self._embeds)
            layout = self._model.lay_out(options)
            adapted = self._adapted_bytes * min(options.n_ubatch, options.n_ctx)
            return replace(layout, compute=tuple(n + adapted for n in layout.compute))
        # llama.cpp keeps a record of every cell even without allocating it, so a far too large
        # cache would take minutes to lay out, and it ends the process if a device cannot address
        # the cells. Beyond this size, all parts grow evenly.
        unit = CELLS_STEP if unified else CELLS_STEP * slots
        nearer = max(exact // 2 // unit, 1) * unit
        first, second = (self._layout(nearer * n, slots, unified) for n in (1, 2))
        steps = (cells - 2 * nearer) / nearer

        def grown(few: int, many: int) -> int:
            return round(many + steps * (many - few))

        return replace(
            second,
            kv=tuple(map(grown, first.kv, second.kv)),
            compute=tuple(map(grown, first.compute, second.compute)),
            host_compute=grown(first.host_compute, second.host_compute),
            output=grown(first.output, second.output),
            largest_kv=grown(first.largest_kv, second.largest_kv),
        )

    def _addressable_cells(self) -> int:
        """The most cells that the devices can address: the keys of a layer are one tensor."""
        if not self._devices or self._embeds:
            return _ANY_CELLS
        least = CELLS_STEP * self._settings.slots
        kv = KvCache(least, CELLS_STEP)
        options = context_options(self._settings, kv, threads=1, embeds=False)
        layout = self._model.lay_out(options)
        tensor = layout.largest_kv
        if not tensor:
            return _ANY_CELLS
        return placement.largest_tensor_bytes(self._devices) * least // tensor // least * least

    # --- what fits -----------------------------------------------------------------------

    def _available_bytes(self) -> tuple[int, ...]:
        on_host = self._budget.memory_available_bytes
        available = []
        for device in self._devices:
            memory = library.properties_of(device)
            if not memory.total_bytes:  # the device has no memory of its own
                available.append(on_host)
            elif device.uses_host_memory:
                available.append(min(memory.free_bytes, on_host))
            else:
                available.append(memory.free_bytes)
        return tuple(available) or (on_host,)

    def _leaves_room(self, plan: Plan) -> bool:
        """Whether the KV cache of a plan takes no more than half of what the rest leaves."""
        available = plan.available_bytes
        if plan.needed_bytes <= available * _AUTOMATIC_SHARE:
            return True  # whatever the rest takes, so the smallest context is not laid out
        smallest = self._plan_at(CELLS_STEP, self._settings.slots)
        fixed = smallest.needed_bytes - smallest.parts["kv"]
        share = fixed + (available - fixed) * _AUTOMATIC_SHARE if fixed <= available else available
        return plan.needed_bytes <= share

    def _too_large(self, plan: Plan) -> InsufficientVram:
        trained = self._model.trained_context_length
        most = max(trained, plan.context_length)
        length = CELLS_STEP * largest(
            min(most, self._most_cells // plan.slots) // CELLS_STEP,
            lambda n: self._plan_at(n * CELLS_STEP, plan.slots).fits,
        )
        slots = largest(
            min(plan.slots - 1, self._most_cells // plan.context_length),
            lambda n: self._plan_at(plan.context_length, n).fits,
        )
        return replace(plan, largest_context_length=length, largest_slots=slots).refusal()


def _adapted_bytes(adapter: GgufHeader, base: GgufHeader) -> int:
    """The extra bytes for each token of a step while the widest adapted matrix is computed: the
    products with both factors, for each expert that is used."""
    n_used = base.largest(constants().Keys.LLM.EXPERT_USED_COUNT) or 1
    rows = (
        sum(factor.shape[:2]) * (n_used if len(factor.shape) > 2 else 1)
        for factor in adapter.tensors
        if factor.name.endswith(".lora_b")
    )
    return _FLOAT_BYTES * max(rows, default=0)


def _with_divisions(plan: Plan) -> Plan:
    """Name the parts of the plan's pool in its reason; drop them if memory cannot hold the longest
    part while the cells are moved. Whatever finds no room then is computed again."""
    if not plan.kv_divisions:
        return plan
    if plan.memory_bytes < plan.parts["kv"] // min(plan.kv_divisions):
        return replace(plan, kv_divisions=())
    parts = [
        f"{n} parts of {divided(plan.kv_cells, n).context_length:,}" for n in plan.kv_divisions
    ]
    reason = f"{plan.kv_reason}; while all sequences fit, it is divided into {' or '.join(parts)}"
    return replace(plan, kv_reason=reason)
