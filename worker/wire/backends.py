"""The backends. Each has one command, one wheel and one kind of device.

This is the package's only list of them; a test compares it with the commands in `pyproject.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

BackendName = Literal["cpu", "cuda", "vulkan", "metal", "accelerate"]

_MIB = 1 << 20
_NVIDIA = ("/dev/nvidia*", "/dev/dxg")
_VULKAN_HOST = ("GGML_VK_PREFER_HOST_MEMORY", "GGML_VK_ALLOW_SYSMEM_FALLBACK")
_VULKAN_CACHES = ("MESA_SHADER_CACHE_DIR", "__GL_SHADER_DISK_CACHE_PATH")


@dataclass(frozen=True, slots=True)
class Backend:
    title: str
    """Its name in sentences."""
    registries: frozenset[str] = frozenset()
    """The ggml registries whose devices its command may use; none for a CPU."""
    plugins: tuple[str, ...] = ()
    """The GPU libraries of its wheel, without the prefix `libggml-`."""
    margin_bytes: int = 256 * _MIB
    """Kept free for what no report lists: driver workspaces, allocator slack, the process."""
    fields: tuple[str, ...] = ()
    """Settings that only its command has; the first chooses the device."""
    shown_by: str | None = None
    """The variable that restricts which cards the driver shows to a process."""
    listed_by: str | None = None
    """The command that lists all cards of the machine."""
    deceptive: tuple[str, ...] = ()
    """Variables that make ggml report memory as a device's that is not the device's own."""
    ray_resource: str | None = None
    """Ray's name for one of its devices."""
    nodes: tuple[str, ...] = ()
    """Patterns of the device nodes that its drivers open."""
    cache_variables: tuple[str, ...] = ()
    """The variables that set where its drivers cache what they compile."""

    @property
    def on_gpu(self) -> bool:
        return bool(self.registries)


BACKENDS: Mapping[BackendName, Backend] = {
    "cpu": Backend("CPU"),
    "cuda": Backend(
        "CUDA",
        registries=frozenset({"CUDA"}),
        plugins=("cuda",),
        margin_bytes=512 * _MIB,
        fields=("cuda_device",),
        shown_by="CUDA_VISIBLE_DEVICES",
        listed_by="nvidia-smi -L",
        deceptive=("GGML_CUDA_ENABLE_UNIFIED_MEMORY", "GGML_CUDA_DEVICES"),
        ray_resource="GPU",
        nodes=(*_NVIDIA, "/dev/nvhost*", "/dev/nvmap", "/dev/nvgpu"),
        cache_variables=("CUDA_CACHE_PATH",),
    ),
    "vulkan": Backend(
        "Vulkan",
        registries=frozenset({"Vulkan"}),
        plugins=("vulkan",),
        fields=("vulkan_device", "allow_software_device"),
        shown_by="GGML_VK_VISIBLE_DEVICES",
        listed_by="vulkaninfo --summary",
        deceptive=_VULKAN_HOST,
        ray_resource="GPU",
        nodes=("/dev/dri", *_NVIDIA, "/dev/mali*", "/dev/kgsl*", "/dev/udmabuf"),
        cache_variables=_VULKAN_CACHES,
    ),
    "metal": Backend(
        "Metal",
        # `MTL` on a Mac itself; the others reach the Mac's GPU from a container.
        registries=frozenset({"MTL", "ggml-virtgpu", "Vulkan"}),
        plugins=("metal", "vulkan", "virtgpu"),
        fields=("metal_device",),
        deceptive=_VULKAN_HOST,
        nodes=("/dev/dri", "/dev/udmabuf"),
        cache_variables=_VULKAN_CACHES,
    ),
    "accelerate": Backend("Accelerate"),
}
