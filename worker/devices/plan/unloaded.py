"""What a model and its context take: llama.cpp itself lays them out, without allocating."""

from __future__ import annotations

from dataclasses import dataclass

from worker.devices.plan import placement
from worker.devices.residency.load_report import parse
from worker.errors import ConfigError, VramOom
from worker.llama.context import Context, ContextOptions
from worker.llama.memory_kind import MemoryKind
from worker.llama.model import LoadOptions, Model
from worker.models.gguf.header import GgufHeader


@dataclass(frozen=True, slots=True)
class Layout:
    """Bytes of a context by kind, on the devices and on the host, and its kind of memory."""

    kv: tuple[int, ...]
    """On each device, or in memory."""
    compute: tuple[int, ...]
    host_compute: int
    output: int
    largest_kv: int
    """The largest tensor of cells: the keys or the values of one layer."""
    memory_kind: MemoryKind


class Unloaded:
    """A model whose weights are not read; raises `ModelError` if llama.cpp refuses the file."""

    def __init__(
        self,
        header: GgufHeader,
        devices: placement.Devices,
        layers: tuple[int, ...] = (),
        role: str = "model",
        *,
        mtp: bool = False,
    ) -> None:
        self._devices, self._role = devices, role
        self.path = str(header.path)
        self.weights = placement.place(header, devices, layers)
        size = (header.architecture, header.vocab_size) if header.vocab_size else None
        # With no_alloc, llama.cpp must not map the file; there is nothing to lock, either.
        options = LoadOptions(
            devices=devices,
            layers=layers,
            mmap=False,
            no_alloc=True,
            mtp=mtp,
            tensor_placement=self.weights.placed,
            extra_buffer_types=placement.may_repack(header),
            metadata=header.overridden,
            without_vocabulary=size,
        )
        self._model = Model(self.path, options)
        self.trained_context_length = self._model.trained_context_length
        self._n_vocab, self.n_embd = self._model.n_vocab, self._model.n_embd
        unused = parse(self._model.load_log).unused_bytes
        *others, last = self.weights.device_bytes
        self.weight_bytes = (*others, max(last - unused, 0))
        """On each device, or in memory."""

    def close(self) -> None:
        self._model.close()

    def lay_out(self, options: ContextOptions) -> Layout:
        """Raises `ConfigError` if the model cannot run with these options."""
        slots = options.n_seq_max
        role = f"{self._role}'s MTP layers" if options.mtp == "head" else self._role
        try:
            context = Context(self._model, options)
        except VramOom as error:
            # Nothing is allocated here, so the fault is in the settings.
            cells = f"{slots} slots of {options.n_ctx // slots:,} tokens"
            if options.kv_unified:
                cells = f"{slots} slots in a pool of {options.n_ctx:,} cells"
            keys, values = options.kv_types
            kv_type = f"--kv-type {keys}"
            if keys != values:
                kv_type = f"--kv-type-k {keys}, --kv-type-v {values}"
            raise ConfigError(
                f"The {role} cannot run with {cells}, {kv_type} "
                f"and --flash-attention {options.flash_attention}: {error.message}."
            ) from error
        report = parse(context.load_log)
        context.close()
        # Backends that compute in the same memory (BLAS beside the CPU) share one buffer, but
        # each of them names it here.
        computes = {b.device: b.size_bytes for b in report.buffers if b.kind == "compute"}
        names = [{device.name, placement.buffer_type_name(device)} for device in self._devices]
        own = [computes.keys() & each for each in names] or [set(computes)]
        compute = tuple(sum(computes[name] for name in each) for each in own)
        host_compute = sum(computes.values()) - sum(compute)
        output = report.bytes_of("output")
        if options.embeddings:
            # What a text of full length takes: llama.cpp keeps each row's embedding, and has room
            # for each row's logits.
            output = max(output, 4 * options.n_batch * (self._n_vocab + self.n_embd))
        if options.mtp == "trunk":
            # llama.cpp allocates the hidden states only with the first batches.
            of_row = 4 * self.n_embd
            *others, last = compute
            compute = (*others, last + of_row * min(options.n_ubatch, options.n_ctx))
            output += of_row * options.n_batch
        kv: tuple[int, ...] = (report.kv_bytes,)
        if len(self._devices) > 1:
            kv = tuple(round(report.kv_by_device[device.name]) for device in self._devices)
        return Layout(
            kv=kv,
            compute=compute,
            host_compute=host_compute,
            output=output,
            largest_kv=report.largest_kv_bytes,
            memory_kind=context.memory_kind,
        )
