"""Which device serves: what the wheel and the machine really offer, held against the command.

Runs in the engine process and in short-lived command processes, before any model is touched. A
worker never falls back to another device: whatever does not match ends the start here.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.devices import rpc_device
from worker.errors import BackendMismatch
from worker.llama import library
from worker.messages import Backend, EngineConfig

GPU_REGISTRIES: dict[Backend, frozenset[str]] = {
    "cuda": frozenset({"CUDA"}),
    # On a Mac itself, or from a container through the paths that reach the Mac's GPU.
    "metal": frozenset({"MTL", "ggml-virtgpu", "Vulkan"}),
}
"""ggml registries whose devices a GPU command may take."""
_GPU_PLUGINS: dict[Backend, tuple[str, ...]] = {
    "cuda": ("cuda",),
    "metal": ("metal", "vulkan", "virtgpu"),
}
"""The wheel's libraries of such a backend, without `libggml-`."""
_LACKING = {
    "libcuda.so": " It belongs to the NVIDIA driver; a container gets it with --gpus.",
    "libcudart.so": " It belongs to the CUDA runtime; install it, or name its folder in "
    "LD_LIBRARY_PATH.",
    "libcublas": " It belongs to cuBLAS; install it, or name its folder in LD_LIBRARY_PATH.",
}
"""Libraries that a plug-in finds on the machine, and where they come from."""
_CPU_REGISTRIES = frozenset({"CPU", "BLAS"})
_SOFTWARE_RENDERER = re.compile(
    r"llvmpipe|lavapipe|softpipe|swrast|swiftshader|software (rasterizer|renderer)|"
    r"\bwarp\b|basic render",
    re.IGNORECASE,
)
_CPU_PLUGIN = re.compile(r"loaded CPU backend from .*libggml-cpu(?:-(?P<variant>\w+))?\.\w+")
_REASON = re.compile(r"(error|fail|no .*device|not found|unable|insufficient)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Selected:
    """The one device that will hold the model."""

    device: library.Device | None
    """`None` for a CPU backend: nothing is offloaded."""
    name: str
    """`CPU`, `CUDA0`, `MTL0`, `RPC0`…"""
    cpu_variant: str | None
    """The plug-in chosen for this machine's CPU, such as `haswell`; `None` when it is built in."""
    build: dict[str, Any] = field(default_factory=dict)
    """The wheel's stamp, empty for a wheel that has none."""

    @property
    def is_gpu(self) -> bool:
        return self.device is not None


def select_device(config: EngineConfig) -> Selected:
    """The device that `config` asks for.

    Raises:
        BackendMismatch: this wheel or this machine has no such device; the sentence names what
            was found.
    """
    library.load()
    build = wheel_stamp()
    devices = library.devices()
    if config.backend in GPU_REGISTRIES:
        test_device = rpc_device.register(config.rpc_endpoint)
        if test_device:
            devices, candidates = library.devices(), test_device
        else:
            _check_stamp(config.backend, build, devices)
            candidates = [d for d in devices if _is_gpu_of(config.backend, d)]
        device = _choose(config, candidates, devices)
        return Selected(device, device.name, cpu_variant(), build)
    _check_stamp(config.backend, build, devices)
    if config.backend == "cpu":
        _refuse_gpu_wheel(devices)
    if config.blas:
        _load_blas()
    return Selected(None, "CPU", cpu_variant(), build)


def wheel_stamp() -> dict[str, Any]:
    """What our build wrote into the wheel: backend, flags, compiler; empty for another's wheel."""
    try:
        text = (library.folder() / "llorch-build.json").read_text("utf-8")
    except FileNotFoundError:
        return {}
    stamp: dict[str, Any] = json.loads(text)
    return stamp


def cpu_variant() -> str | None:
    """The CPU plug-in that llama.cpp chose, from its own report."""
    for line in library.startup_log:
        if match := _CPU_PLUGIN.search(line):
            return match["variant"]
    return None


def describe(device: library.Device) -> str:
    """`CUDA0 (NVIDIA H100, 81,000 MiB)`, for sentences."""
    size = f", {device.total_bytes >> 20:,} MiB" if device.total_bytes else ""
    return f"{device.name} ({device.description}{size})"


def is_software(device: library.Device) -> bool:
    """Whether a device that calls itself a GPU computes on the CPU."""
    return bool(_SOFTWARE_RENDERER.search(f"{device.name} {device.description}"))


def _is_gpu_of(backend: Backend, device: library.Device) -> bool:
    return device.registry in GPU_REGISTRIES[backend] and device.kind in ("gpu", "igpu", "cpu")


def _choose(
    config: EngineConfig, candidates: list[library.Device], devices: list[library.Device]
) -> library.Device:
    if not candidates:
        raise BackendMismatch(
            f"llorch-{config.backend} needs a {config.backend.upper()} device and there is none. "
            f"{_why_none(config.backend)} Found: {_listed(devices)}.",
            backend=config.backend,
            found=[device.name for device in devices],
        )
    if not 0 <= config.device_index < len(candidates):
        raise BackendMismatch(
            f"--{config.backend}-device is {config.device_index}, but there "
            f"{'is one device' if len(candidates) == 1 else f'are {len(candidates)} devices'}: "
            + "; ".join(f"{number} = {describe(d)}" for number, d in enumerate(candidates))
            + _visibility_hint(config.backend)
            + ".",
            backend=config.backend,
            device_index=config.device_index,
            found=[device.name for device in candidates],
        )
    device = candidates[config.device_index]
    if is_software(device) or device.kind == "cpu":
        raise BackendMismatch(
            f"{describe(device)} is a software renderer: it computes on the CPU while it looks "
            "like a GPU; give the container access to a real GPU.",
            backend=config.backend,
            found=[device.name],
        )
    return device


def _check_stamp(backend: Backend, build: dict[str, Any], devices: list[library.Device]) -> None:
    built_for = build.get("backend", backend)
    if built_for != backend:
        raise BackendMismatch(
            f"llorch-{backend} needs a llama-cpp-python wheel built for {backend}, but the "
            f"installed one is built for {built_for}; start llorch-{built_for} or install the "
            f"{backend} wheel. Found: {_listed(devices)}.",
            backend=backend,
            wheel_backend=built_for,
            found=[device.name for device in devices],
        )


def _listed(devices: list[library.Device]) -> str:
    return "; ".join(describe(device) for device in devices)


def _load_blas() -> None:
    """BLAS lies apart from the other plug-ins, because it mostly slows down: only on demand."""
    ggml = library.ggml()
    if any(device.registry == "BLAS" for device in library.devices()):
        return  # built in, or loaded before
    folder = library.folder() / "optional"
    for plugin in sorted(folder.glob("libggml-blas.*")):
        if ggml.ggml_backend_load(os.fsencode(plugin)):
            return
        raise BackendMismatch(f"--blas is on, but the plug-in {plugin} cannot be loaded.")
    raise BackendMismatch(
        "--blas is on, but the installed llama-cpp-python wheel carries no BLAS plug-in; "
        "leave it off or install a wheel that does."
    )


def _refuse_gpu_wheel(devices: list[library.Device]) -> None:
    """`llorch-cpu` wants a wheel without GPU code, so that it cannot end up on a GPU."""
    others = [d for d in devices if d.registry not in _CPU_REGISTRIES and d.registry != "RPC"]
    if others:
        raise BackendMismatch(
            "llorch-cpu needs a CPU wheel, but the installed llama-cpp-python offers "
            + _listed(others)
            + "; start the command of that backend or install the CPU wheel.",
            backend="cpu",
            found=[device.name for device in others],
        )
    if plugin := _gpu_plugin("cuda", "metal"):
        raise BackendMismatch(
            f"llorch-cpu needs a CPU wheel, but the installed llama-cpp-python carries "
            f"{plugin.name}; start the command of that backend or install the CPU wheel.",
            backend="cpu",
            found=[plugin.name],
        )


def _gpu_plugin(*backends: Backend) -> Path | None:
    """A GPU library of the wheel, which may be there although no device is."""
    for backend in backends:
        for name in _GPU_PLUGINS[backend]:
            for path in sorted(library.folder().glob(f"libggml-{name}*")):
                return path
    return None


def _why_none(backend: Backend) -> str:
    """What the wheel or the driver says about its missing device."""
    plugin = _gpu_plugin(backend)
    if plugin is None:
        return f"The installed llama-cpp-python wheel has no {backend.upper()} code."
    for line in library.startup_log:
        if backend in line.lower() and _REASON.search(line):
            return f"The driver says: {line.strip()}."
    try:
        ctypes.CDLL(str(plugin))  # llama.cpp passes silently over a plug-in that does not load
    except OSError as error:
        hint = next((hint for name, hint in _LACKING.items() if name in str(error)), "")
        return f"{plugin.name} cannot be loaded: {error}.{hint}"
    return f"No driver or no visible device{_visibility_hint(backend)}."


def _visibility_hint(backend: Backend) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if backend == "cuda" and visible is not None:
        return f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    return ""
