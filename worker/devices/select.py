"""Selects the device to serve on, from what the wheel and the machine really offer.

Runs in the engine process and in short-lived command processes, before any model is touched. A
worker never falls back to another device: a mismatch ends the start.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from worker.devices import nvidia
from worker.errors import BackendMismatch
from worker.llama import library
from worker.wire.backends import BACKENDS, BackendName
from worker.wire.engine_settings import EngineSettings

_LACKING = {
    "libcuda.so": " It belongs to the NVIDIA driver; a container gets it with --gpus.",
    "libcudart.so": " It belongs to the CUDA runtime; install it, or name its folder in "
    "LD_LIBRARY_PATH.",
    "libcublas": " It belongs to cuBLAS; install it, or name its folder in LD_LIBRARY_PATH.",
    "libvulkan.so": " It is Vulkan's loader; Debian and Ubuntu have it in the package libvulkan1.",
}
"""Libraries that a plug-in needs from the machine, and where they come from."""
CPU_REGISTRIES = {"CPU", "BLAS"}
"""Registries that a CPU wheel may have; any other belongs to a GPU wheel."""
_SOFTWARE_RENDERER = re.compile(
    r"llvmpipe|lavapipe|softpipe|swrast|swiftshader|software (rasterizer|renderer)|"
    r"\bwarp\b|basic render",
    re.IGNORECASE,
)
_GPU_KINDS = ("gpu", "igpu", "cpu")
"""A software device is of the kind `cpu`."""
_NO_GPU = "ggml_vulkan: No devices found"
_CPU_PLUGIN = re.compile(r"loaded CPU backend from .*libggml-cpu(?:-(?P<variant>[\w.]+))?\.\w+")
_REASON = re.compile(r"(error|fail|no .*device|not found|unable|insufficient)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as it was when it was selected."""

    device: library.Device
    total_bytes: int
    pci_id: str | None = None
    """Its PCI address for NVIDIA's management library; `None` for other devices."""
    used_before: Mapping[int, int] = field(default_factory=dict)
    """Bytes in use by process id, as that library listed them before the load."""


@dataclass(frozen=True, slots=True)
class Selected:
    """What will hold the model: the CPU, one GPU, or a set of them."""

    cards: tuple[Card, ...] = ()
    """Empty for a CPU backend: nothing is offloaded."""

    @property
    def devices(self) -> tuple[library.Device, ...]:
        return tuple(card.device for card in self.cards)

    @property
    def names(self) -> tuple[str, ...]:
        """`CPU`, or `CUDA0`, `Vulkan0`, `MTL0`, `RPC0`…"""
        return tuple(device.name for device in self.devices) or ("CPU",)

    @property
    def first(self) -> Selected:
        """The CPU, or the first card alone, which holds what is too small to split."""
        return replace(self, cards=self.cards[:1])

    @property
    def total_bytes(self) -> int:
        """The devices' memory when they were selected; 0 for a CPU."""
        return sum(card.total_bytes for card in self.cards)

    @property
    def is_gpu(self) -> bool:
        return bool(self.cards)


def select_device(settings: EngineSettings) -> Selected:
    """The devices that `settings` asks for.

    Raises `BackendMismatch`, which names what was found, if wheel or machine has no such device.
    """
    for name in BACKENDS[settings.backend].deceptive:
        if name in os.environ:
            raise BackendMismatch(
                f"{name} is set: with it, memory that is not on a device counts as the device's. "
                "Unset it: a worker's whole model must be on its device."
            )
    indices = hide_other_cards(settings)
    library.load()
    devices = library.devices()
    _check_stamp(settings.backend, devices)
    if settings.on_gpu:
        own = BACKENDS[settings.backend].registries
        candidates = [d for d in devices if d.registry in own and d.kind in _GPU_KINDS]
        chosen = [_choose(settings, index, candidates, devices) for index in indices]
        return Selected(tuple(map(_card, chosen)))
    if settings.backend == "cpu":
        _refuse_gpu_wheel(devices)
    if settings.blas == "on":
        _load_blas()
    return Selected()


def _card(device: library.Device) -> Card:
    found = library.properties_of(device)
    pci_id = found.pci_id if device.registry == "CUDA" else None
    return Card(device, found.total_bytes, pci_id, nvidia.processes(pci_id))


def hide_other_cards(settings: EngineSettings) -> tuple[int, ...]:
    """Make the chosen cards the only visible ones, before the driver starts, and return the indices
    that they have from then on.

    CUDA's driver touches every visible card, and a broken one ends the process; its indices become
    those of `nvidia-smi`. ggml's Vulkan lists software devices only if they are named explicitly.
    """
    indices, backend = settings.device_indices, BACKENDS[settings.backend]
    if settings.backend == "cuda":
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    elif not settings.allow_software_device:
        return indices
    return _show_only(indices, backend.shown_by) if backend.shown_by else indices


@cache
def _show_only(indices: tuple[int, ...], variable: str) -> tuple[int, ...]:
    if library.is_loaded():
        return indices
    n_cards = nvidia.count() if variable == "CUDA_VISIBLE_DEVICES" else None
    cards = list(map(str, range(n_cards or max(indices) + 1)))
    if (shown := os.environ.get(variable)) is not None:
        cards = [card.strip() for card in shown.split(",") if card.strip()]
    if max(indices) >= len(cards):
        return indices
    os.environ[variable] = ",".join(cards[index] for index in indices)
    return tuple(range(len(indices)))


def wheel_stamp() -> dict[str, Any]:
    """The build stamp in the wheel: backend, flags, compiler; empty for wheels from elsewhere."""
    try:
        text = (library.folder() / "llorch-build.json").read_text("utf-8")
    except FileNotFoundError:
        return {}
    stamp: dict[str, Any] = json.loads(text)
    return stamp


def cpu_variant() -> str | None:
    """The plug-in for this machine's CPU, such as `haswell`, according to llama.cpp's log; `None`
    if it is built in."""
    for line in library.startup_log:
        if match := _CPU_PLUGIN.search(line):
            return match["variant"]
    return None


def _label(device: library.Device) -> str:
    """`CUDA0 (NVIDIA H100)`, for messages."""
    return f"{device.name} ({device.description})"


def _choose(
    settings: EngineSettings,
    index: int,
    candidates: list[library.Device],
    devices: list[library.Device],
) -> library.Device:
    backend = settings.backend
    if not candidates:
        raise BackendMismatch(
            f"llorch-{backend} needs a {BACKENDS[backend].title} device and there is none. "
            f"{_why_none(backend)} Found: {_listed(devices)}.",
            backend=backend,
            found=[device.name for device in devices],
        )
    if not 0 <= index < len(candidates):
        raise BackendMismatch(
            f"--{backend}-device is {index}, but there "
            f"{'is one device' if len(candidates) == 1 else f'are {len(candidates)} devices'}: "
            + "; ".join(f"{number} = {_label(d)}" for number, d in enumerate(candidates))
            + _visibility_hint(backend)
            + ".",
            backend=backend,
            device_index=index,
            found=[device.name for device in candidates],
        )
    device = candidates[index]
    is_software = _SOFTWARE_RENDERER.search(f"{device.name} {device.description}")
    if (device.kind == "cpu" or is_software) and not settings.allow_software_device:
        raise BackendMismatch(
            f"{_label(device)} is a software renderer: it computes on the CPU while it looks "
            "like a GPU; give this machine or container a real GPU and its driver.",
            backend=backend,
            found=[device.name],
        )
    return device


def _check_stamp(backend: BackendName, devices: list[library.Device]) -> None:
    built_for = wheel_stamp().get("backend", backend)
    if built_for != backend:
        raise BackendMismatch(
            f"llorch-{backend} needs a llama-cpp-python wheel built for {backend}, but the "
            f"installed one is built for {built_for}; start llorch-{built_for} or "
            f"{_install(backend)}. Found: {_listed(devices)}.",
            backend=backend,
            wheel_backend=built_for,
            found=[device.name for device in devices],
        )


def _install(backend: BackendName) -> str:
    return f"install that wheel: llorch-worker install-engine {backend}"


def _listed(devices: list[library.Device]) -> str:
    return "; ".join(_label(device) for device in devices)


def _load_blas() -> None:
    """Load the BLAS plug-in, which is kept apart from the others because it is usually slower."""
    ggml = library.ggml()
    if any(device.registry == "BLAS" for device in library.devices()):
        return  # built in, or already loaded
    plugin = min((library.folder() / "optional").glob("libggml-blas.*"), default=None)
    if plugin is None:
        raise BackendMismatch(
            "--blas is on, but the installed llama-cpp-python wheel carries no BLAS plug-in; "
            "leave it off or install a wheel that does."
        )
    if not ggml.ggml_backend_load(os.fsencode(plugin)):
        raise BackendMismatch(f"--blas is on, but the plug-in {plugin} cannot be loaded.")


def _refuse_gpu_wheel(devices: list[library.Device]) -> None:
    """Refuse a wheel with GPU code, so that `llorch-cpu` can never run on a GPU."""
    if others := [d for d in devices if d.registry not in CPU_REGISTRIES]:
        has, found = f"offers {_listed(others)}", [device.name for device in others]
    elif plugin := _gpu_plugin(*BACKENDS):
        has, found = f"carries {plugin.name}", [plugin.name]
    else:
        return
    raise BackendMismatch(
        f"llorch-cpu needs a CPU wheel, but the installed llama-cpp-python {has}; start the "
        f"command of that backend or {_install('cpu')}.",
        backend="cpu",
        found=found,
    )


def _gpu_plugin(*backends: BackendName) -> Path | None:
    """A GPU library in the wheel, even if there is no device for it."""
    names = [name for backend in backends for name in BACKENDS[backend].plugins]
    found = (path for name in names for path in sorted(library.folder().glob(f"libggml-{name}*")))
    return next(found, None)


def _why_none(backend: BackendName) -> str:
    """Why the device is missing, in the words of the wheel or the driver."""
    plugin = _gpu_plugin(backend)
    if plugin is None:
        return f"The installed llama-cpp-python wheel has no {BACKENDS[backend].title} code."
    if backend == "vulkan" and any(_NO_GPU in line for line in library.startup_log):
        return (
            "The Vulkan loader has none, except perhaps software devices such as llvmpipe, which "
            f"--allow-software-device accepts{_visibility_hint(backend)}."
        )
    for line in library.startup_log:
        if backend in line.lower() and _REASON.search(line):
            return f"The driver says: {line.strip()}."
    try:
        ctypes.CDLL(str(plugin))  # llama.cpp silently skips a plug-in that does not load
    except OSError as error:
        hint = next((hint for name, hint in _LACKING.items() if name in str(error)), "")
        return f"{plugin.name} cannot be loaded: {error}.{hint}"
    return f"No driver or no visible device{_visibility_hint(backend)}."


def _visibility_hint(backend: BackendName) -> str:
    known = BACKENDS[backend]
    variable = known.shown_by
    if variable is None or (visible := os.environ.get(variable)) is None:
        return ""
    return f" ({variable} is {visible!r}; `{known.listed_by}` lists the cards of this machine)"
