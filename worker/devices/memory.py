"""The plan before the load: what the model will take, held against what the device has.

No weight is read: tensor sizes come from the header, and llama.cpp itself lays out the KV cache
and the compute graph of a model that it loads without allocating (`no_alloc`). Runs in the engine
process before the load, and in a process of its own for the `plan` command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from worker.devices import placement
from worker.devices.cpu_budget import CpuBudget
from worker.devices.load_report import parse
from worker.devices.plan import Plan as Plan
from worker.errors import ConfigError, InsufficientVram, VramOom
from worker.llama import library
from worker.llama.context import Context, ContextOptions
from worker.llama.model import LoadOptions, Model
from worker.messages import EngineConfig
from worker.models.gguf import GgufHeader

_MIB = 1 << 20
_MARGIN_BYTES = {
    "cuda": 512 * _MIB,
    "metal": 256 * _MIB,
    "cpu": 256 * _MIB,
    "accelerate": 256 * _MIB,
}
"""For what no report names: driver workspaces, allocator slack, this process itself."""
_STEP = 256
"""llama.cpp rounds context lengths up to multiples of this."""
_EXACT_CELLS = 1 << 21
"""KV cells up to which a context is really laid out for its plan."""
_AUTOMATIC_SHARE = 0.5
"""Of the memory that a CPU host has left, what a context length that nobody chose may take."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """What a context takes, by kind and side."""

    kv: int
    compute: int
    host_compute: int
    output: int


def plan(
    header: GgufHeader, config: EngineConfig, device: library.Device | None, budget: CpuBudget
) -> Plan:
    """How the model would lie in memory, with the context length that will be used.

    Raises:
        InsufficientVram: it does not fit; `details` has needed and available bytes by part and
            the largest `--context-length` and `--slots` that would.
        ModelError: llama.cpp refuses the file.
    """
    planner = _Planner(header, config, device, budget)
    try:
        return planner.plan()
    finally:
        planner.close()


def context_options(
    config: EngineConfig, context_length: int, *, threads: int, embeds: bool
) -> ContextOptions:
    """The one way in which a context is made, for the plan and for the engine alike.

    An embedding's text is computed in one go, because attention looks both ways.
    """
    n_slots = 1 if embeds else config.slots
    return ContextOptions(
        n_ctx=context_length * n_slots,
        n_seq_max=n_slots,
        n_batch=context_length if embeds else config.batch,
        n_ubatch=context_length if embeds else config.micro_batch,
        threads=threads,
        kv_type=config.kv_type,
        kv_unified=config.kv_unified,
        flash_attention=config.flash_attention,
        offload=config.backend in ("cuda", "metal"),
        embeddings=embeds,
    )


class _Planner:
    def __init__(
        self,
        header: GgufHeader,
        config: EngineConfig,
        device: library.Device | None,
        budget: CpuBudget,
    ) -> None:
        self._header, self._config, self._device, self._budget = header, config, device, budget
        self._embeds = header.pooling is not None
        self._weights = placement.place(header, device)
        # With no_alloc a mapped file is not allowed, and there is nothing to map or lock.
        options = LoadOptions(
            device=device,
            mmap=False,
            no_alloc=True,
            tensor_placement=placement.tensor_placement(header, device),
        )
        self._model = Model(config.model_path, options)
        unused = parse(self._model.load_log).unused_bytes
        self._weight_bytes = max(self._weights.device_bytes - unused, 0)
        self._layout = cache(self._lay_out)
        margin = _MARGIN_BYTES[config.backend] + config.memory_margin_bytes
        self._margin = margin
        self._available = self._available_bytes()

    def close(self) -> None:
        self._model.close()

    def plan(self) -> Plan:
        chosen = self._config.context_length
        trained = self._model.trained_context_length
        if chosen is not None:
            plan = self._at(chosen, self._config.slots)
            if not plan.fits:
                raise self._too_large(plan)
            return self._with_host_room(plan)
        plan = self._at(trained, self._config.slots)
        limit = self._automatic_limit()
        if plan.needed_bytes <= limit:
            return self._with_host_room(plan)
        length = self._largest_length(self._config.slots, trained, limit)
        length = length or self._largest_length(self._config.slots, trained, self._available)
        if not length:
            raise self._too_large(self._at(min(_STEP, trained), self._config.slots))
        return self._with_host_room(replace(self._at(length, self._config.slots), capped=True))

    def _with_host_room(self, plan: Plan) -> Plan:
        """A GPU worker takes some of the host's memory too."""
        host_bytes, available = sum(plan.host_parts.values()), self._budget.memory_available_bytes
        if host_bytes > available:
            raise InsufficientVram(
                f"{host_bytes:,} bytes of the host's memory are needed beside {plan.device}, "
                f"{available:,} are available.",
                **plan.as_dict() | {"needed_bytes": host_bytes, "available_bytes": available},
            )
        return plan

    def _at(self, context_length: int, slots: int) -> Plan:
        layout = self._layout(context_length, slots)
        on_gpu = self._device is not None
        parts = {
            "weights": self._weight_bytes,
            "kv": layout.kv,
            "compute": layout.compute,
            "output": 0 if on_gpu else layout.output,
            "margin": self._margin,
        }
        host = {
            "weights": self._weights.host_bytes,
            "compute": layout.host_compute,
            "output": layout.output,
        }
        return Plan(
            model=self._config.model_ref,
            device=self._device.name if self._device else "CPU",
            parts=parts,
            available_bytes=self._available,
            host_parts=host if on_gpu else {},
            context_length=context_length,
            trained_context_length=self._model.trained_context_length,
            slots=slots,
            mapped_beside_bytes=self._weights.mapped_beside_bytes if self._maps() else 0,
        )

    def _maps(self) -> bool:
        chosen = self._config.mmap
        return self._device is None if chosen is None else chosen

    def _lay_out(self, context_length: int, slots: int) -> _Layout:
        if context_length * slots <= _EXACT_CELLS:
            return self._lay_out_exactly(context_length, slots)
        # llama.cpp keeps books on every cell even where it allocates nothing, so a cache that is
        # far too large would take minutes to lay out. From here on all parts grow evenly.
        nearer = max(_EXACT_CELLS // 2 // slots // _STEP, 1) * _STEP
        first, second = (self._layout(nearer * n, slots) for n in (1, 2))
        steps = (context_length - 2 * nearer) / nearer
        return _Layout(
            *(
                round(
                    getattr(second, part) + steps * (getattr(second, part) - getattr(first, part))
                )
                for part in _Layout.__slots__
            )
        )

    def _lay_out_exactly(self, context_length: int, slots: int) -> _Layout:
        config = replace(self._config, slots=slots)
        options = context_options(config, context_length, threads=1, embeds=self._embeds)
        try:
            context = Context(self._model, options)
        except VramOom as error:
            # Nothing is allocated here, so it is the settings that do not go with the model.
            raise ConfigError(
                f"The model cannot run with {slots} slots of {context_length:,} tokens, --kv-type "
                f"{config.kv_type} and --flash-attention {config.flash_attention}: {error.message}."
            ) from error
        try:
            report = parse(context.load_log)
        finally:
            context.close()
        own = self._own_types()
        # Backends that compute in the same memory (BLAS beside the CPU) share one buffer, but
        # each of them names it here.
        computes = {b.device: b.size_bytes for b in report.buffers if b.kind == "compute"}
        return _Layout(
            kv=report.kv_bytes,
            compute=sum(size for device, size in computes.items() if not own or device in own),
            host_compute=sum(
                size for device, size in computes.items() if own and device not in own
            ),
            output=report.bytes_of("output"),
        )

    def _own_types(self) -> frozenset[str]:
        if self._device is None:
            return frozenset()
        return frozenset({self._device.name, placement.buffer_type_name(self._device)})

    # --- what fits -----------------------------------------------------------------------

    def _available_bytes(self) -> int:
        if self._device is None:
            return self._budget.memory_available_bytes
        if self._device.total_bytes == 0:  # it has no memory of its own to report
            return self._budget.memory_available_bytes
        return self._device.free_bytes

    def _automatic_limit(self) -> int:
        """A GPU is the worker's own; a host's memory is shared, so half of the rest is left."""
        if self._device is not None:
            return self._available
        smallest = self._at(_STEP, self._config.slots)
        fixed = smallest.needed_bytes - smallest.parts["kv"]
        return int(fixed + max(self._available - fixed, 0) * _AUTOMATIC_SHARE)

    def _largest_length(self, slots: int, most: int, limit: int) -> int:
        return _STEP * _largest(
            most // _STEP, lambda n: self._at(n * _STEP, slots).needed_bytes <= limit
        )

    def _too_large(self, plan: Plan) -> InsufficientVram:
        trained = self._model.trained_context_length
        most = max(trained, plan.context_length)
        length = self._largest_length(plan.slots, most, self._available)
        slots = _largest(
            plan.slots - 1,
            lambda n: self._at(plan.context_length, n).needed_bytes <= self._available,
        )
        return replace(plan, largest_context_length=length, largest_slots=slots).refusal()


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, 0 when none does; fitting is monotonic."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
