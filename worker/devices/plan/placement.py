"""Computes where each weight goes and how many bytes it takes there, by asking ggml.

Nothing is loaded. A tensor's type and shape from the header are enough for ggml to say how many
bytes it takes on a device, and whether the device has a kernel for it. Runs in the engine process
and in command processes.
"""

from __future__ import annotations

import ctypes
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from worker.errors import ConfigError
from worker.llama import library
from worker.llama.model import LoadOptions
from worker.models.gguf.constants import constants
from worker.models.gguf.header import GgufHeader
from worker.models.gguf.tensors import TensorEntry, padded

LOOKED_UP = frozenset(
    {
        "token_embd.weight",
        "position_embd.weight",
        "token_types.weight",
        "per_layer_token_embd.weight",
    }
)
"""Tensors of the input layer, in which rows are looked up. llama.cpp keeps them on the host."""
OUTPUT_FIRST = frozenset({"gemma3n", "gemma4"})
"""Architectures whose output layer llama.cpp creates before the input embedding. If both are one
tensor, the embedding is then a copy; in all others the output layer is the embedding itself."""
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.")
_EXPERTS = re.compile(r"_exps\.weight$")
_PROBED_ROWS = 512
_META_BYTES = 1 << 20
_MOST_TENSOR_MIB = 1 << 24
_BUFFER_OFFSET = 8
"""The offset of `buffer` in `ggml_tensor`, after the 4-byte type and padding."""


@dataclass(frozen=True, slots=True)
class Weights:
    device_bytes: tuple[int, ...]
    """Bytes on each chosen device; for a CPU backend, in memory."""
    host_bytes: int
    """Bytes on the host although a GPU was chosen; 0 for a CPU backend."""
    host_tensors: tuple[str, ...]
    placed: tuple[tuple[str, int], ...]
    """Patterns of the input layer's tensors that llama.cpp must put on the device, each with a
    buffer type: `LoadOptions.tensor_placement`."""


NOTHING = Weights((0,), 0, (), ())
Devices = tuple[library.Device, ...]


def place(header: GgufHeader, devices: Devices, layers: tuple[int, ...] = ()) -> Weights:
    """Place all weights on the GPUs, each of which has its number of `layers`; without GPUs, in
    memory."""
    with closing(_Meta()) as meta:
        if not devices:
            return _place_on_cpu(header, meta)
        return _place_on_gpus(header, devices, layers, meta)


def load_options(header: GgufHeader, devices: Devices, **others: Any) -> LoadOptions:
    """The options to load all of a model onto these devices, or into memory."""
    return LoadOptions(
        devices=devices,
        # On a CPU, no tensor has to be placed, so ggml need not be asked.
        tensor_placement=place(header, devices[:1]).placed if devices else (),
        extra_buffer_types=may_repack(header),
        **others,
    )


def may_repack(header: GgufHeader) -> bool:
    """Whether llama.cpp may repack weights for this processor: `LoadOptions.extra_buffer_types`.

    ggml's buffer type for AMX accepts a matrix of several planes, which latent attention has, but
    cannot use it. It keeps only the first plane of a quantised one. It refuses the vectors, which
    are not contiguous there, so llama.cpp finds nothing that multiplies with the matrix, and ends
    the process.
    """
    planes = [each for each in header.tensors if each.shape[2:] and not _EXPERTS.search(each.name)]
    if not planes:
        return True
    cpu = _cpu()
    with closing(_Meta()) as meta:
        types = _extra_buffer_types(cpu)
        return not any(meta.multiplies(each, cpu, kind, 1) for each in planes for kind in types)


def shared_out(header: GgufHeader, available: Sequence[int]) -> tuple[int, ...]:
    """The number of layers for each of several devices, by their available bytes.

    The output layer counts as one. Each device gets at least one layer.

    Raises:
        ConfigError: there are more devices than layers.
    """
    n_devices, n_layers = len(available), (header.block_count or 0) + 1
    if n_devices > n_layers:
        raise ConfigError(
            f"The model has {n_layers - 1} layers and an output, which {n_devices} devices cannot "
            "share; name fewer devices."
        )
    sizes = [0] * n_layers
    for tensor in header.tensors:
        sizes[_layer_of(tensor, n_layers)] += tensor.n_bytes
    ends = [end / sum(available) * sum(sizes) for end in accumulate(available)]
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    first = 0
    layers = []
    for device, end in enumerate(ends[:-1]):
        n_after = n_devices - device - 1
        wanted = sum(middle < end for middle in middles) - first
        layers.append(min(max(wanted, 1), n_layers - first - n_after))
        first += layers[-1]
    return (*layers, n_layers - first)


def largest_tensor_bytes(devices: Devices) -> int:
    """The size of the largest tensor, to a MiB, that all devices accept: a Vulkan driver may limit
    how much of a buffer a kernel can reach. llama.cpp ends the process at a larger tensor."""
    with closing(_Meta()) as meta:
        most = largest(_MOST_TENSOR_MIB, lambda n: all(meta.takes(n << 20, d) for d in devices))
    return most << 20


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, 0 if none does; `fits` must be monotonic."""
    return bisect_left(range(1, most + 1), True, key=lambda n: not fits(n))


def _layer_of(tensor: TensorEntry, n_layers: int) -> int:
    """The layer whose device a tensor is on: the first for the input, the last for the output."""
    if match := _BLOCK.match(tensor.name):
        return min(int(match["layer"]), n_layers - 1)
    return 0 if tensor.name in LOOKED_UP else n_layers - 1


def buffer_type_name(device: library.Device) -> str:
    """The name of the device's memory in llama.cpp's log: `CUDA0`, `RPC0[host:port]`…"""
    lib = library.ggml()
    name: bytes = lib.ggml_backend_buft_name(lib.ggml_backend_dev_buffer_type(device.handle))
    return name.decode()


def _place_on_gpus(
    header: GgufHeader, devices: Devices, layers: tuple[int, ...], meta: _Meta
) -> Weights:
    lib = library.ggml()
    types = [lib.ggml_backend_dev_buffer_type(device.handle) for device in devices]
    device_bytes, host_bytes = [0] * len(devices), 0
    n_layers, ends = sum(layers) or 1, list(accumulate(layers))
    host: list[str] = []
    placed: list[tuple[str, int]] = []
    for tensor in header.tensors:
        at = bisect_right(ends, _layer_of(tensor, n_layers))
        size = meta.allocated_bytes(tensor, types[at])
        if tensor.name not in LOOKED_UP:
            device_bytes[at] += size
        elif meta.takes_rows(tensor, devices[at], types[at]):
            placed.append((f"^{re.escape(tensor.name)}$", types[at]))
            device_bytes[at] += size
            if header.architecture in OUTPUT_FIRST and _is_output_too(tensor, header):
                device_bytes[at] += size
        else:
            host.append(tensor.name)
            host_bytes += tensor.n_bytes
            if _is_output_too(tensor, header):
                device_bytes[-1] += size  # the output layer has a copy of its own
    return Weights(tuple(device_bytes), host_bytes, tuple(host), tuple(placed))


def _place_on_cpu(header: GgufHeader, meta: _Meta) -> Weights:
    cpu = _cpu()
    plain_type = library.ggml().ggml_backend_dev_buffer_type(cpu.handle)
    faster = _extra_buffer_types(cpu) if may_repack(header) else []
    n_experts = header.largest(constants().Keys.LLM.EXPERT_USED_COUNT) or 1
    total = 0
    for tensor in header.tensors:
        kinds = [b for b in faster if meta.multiplies(tensor, cpu, b, n_experts)]
        looked_up = tensor.name in LOOKED_UP
        if looked_up or not kinds:
            total += meta.allocated_bytes(tensor, plain_type)
        if kinds and (_is_output_too(tensor, header) or not looked_up):
            total += meta.allocated_bytes(tensor, kinds[0])
    return Weights((total,), 0, (), ())


def _is_output_too(tensor: TensorEntry, header: GgufHeader) -> bool:
    """Whether it is the input embedding and also the output layer, which encoders lack."""
    if tensor.name != "token_embd.weight":
        return False
    names = {tensor.name for tensor in header.tensors}
    # LFM2 names its output norm like the norm that encoders have after their embedding.
    has_output = "output_norm.weight" in names or header.architecture.startswith("lfm2")
    return has_output and "output.weight" not in names


def _cpu() -> library.Device:
    return next(device for device in library.devices() if device.kind == "cpu")


def _extra_buffer_types(cpu: library.Device) -> list[int]:
    """The CPU backend's repacking buffer types, best first."""
    lib = library.ggml()
    registry = lib.ggml_backend_dev_backend_reg(cpu.handle)
    address = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return []
    prototype = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
    entries = prototype(address)(cpu.handle)
    found: list[int] = []
    while entries and (entry := entries[len(found)]):
        found.append(entry)
    return found


class _Meta:
    """Tensors without data, made to ask ggml about them."""

    def __init__(self) -> None:
        self._lib, self._types = library.ggml(), library.type_numbers()
        self._context = self._lib.ggml_init(library.InitParams(_META_BYTES, None, True))
        self._dummies: dict[int, int] = {}

    def allocated_bytes(self, tensor: TensorEntry, buffer_type: int) -> int:
        """The tensor's bytes in a buffer of that type, with padding."""
        lib = self._lib
        size = int(lib.ggml_backend_buft_get_alloc_size(buffer_type, self._tensor(tensor)))
        lib.ggml_reset(self._context)
        return padded(size, int(lib.ggml_backend_buft_get_alignment(buffer_type)))

    def takes(self, n_bytes: int, device: library.Device) -> bool:
        """Whether a tensor of `n_bytes` can be on the device."""
        return self._supports(device, self._new("F32", (n_bytes // 4,)))

    def takes_rows(self, tensor: TensorEntry, device: library.Device, buffer_type: int) -> bool:
        """Whether the device can look up rows in a tensor of this type and shape."""
        weight = self._tensor(tensor, buffer_type)
        rows = self._new("I32", (_PROBED_ROWS,))
        return self._supports(device, self._lib.ggml_get_rows(self._context, weight, rows))

    def multiplies(
        self, tensor: TensorEntry, device: library.Device, buffer_type: int, n_experts: int
    ) -> bool:
        """Whether the device can multiply by a matrix in that buffer, as llama.cpp tests it."""
        if len(tensor.shape) < 2 or not tensor.name.endswith(".weight"):
            return False
        lib = self._lib
        weight = self._tensor(tensor, buffer_type)
        width = tensor.shape[0]
        if _EXPERTS.search(tensor.name):
            ids = self._new("I32", (n_experts, _PROBED_ROWS))
            vectors = self._new("F32", (width, n_experts, _PROBED_ROWS))
            product = lib.ggml_mul_mat_id(self._context, weight, vectors, ids)
        else:
            vectors = self._new("F32", (width, _PROBED_ROWS, *tensor.shape[2:]))
            product = lib.ggml_mul_mat(self._context, weight, vectors)
        return self._supports(device, product)

    def _supports(self, device: library.Device, operation: int) -> bool:
        answer = self._lib.ggml_backend_dev_supports_op(device.handle, operation)
        self._lib.ggml_reset(self._context)
        return bool(answer)

    def _tensor(self, tensor: TensorEntry, buffer_type: int | None = None) -> int:
        address = self._new(tensor.type_name, tensor.shape)
        if buffer_type is not None:
            if buffer_type not in self._dummies:
                dummy = self._lib.ggml_backend_buft_alloc_buffer(buffer_type, 0)
                self._dummies[buffer_type] = dummy
            field = ctypes.c_void_p.from_address(address + _BUFFER_OFFSET)
            field.value = self._dummies[buffer_type]
        return address

    def _new(self, type_name: str, shape: tuple[int, ...]) -> int:
        number, dimensions = self._types[type_name], (ctypes.c_int64 * len(shape))(*shape)
        address: int = self._lib.ggml_new_tensor(self._context, number, len(shape), dimensions)
        return address

    def close(self) -> None:
        for buffer in self._dummies.values():
            self._lib.ggml_backend_buffer_free(buffer)
        self._lib.ggml_free(self._context)
