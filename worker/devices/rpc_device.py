"""A GPU for tests: llama.cpp's RPC device, which takes the real offload path on any machine.

Used only where `TEST_LLORCH_DEVICE` (or `EngineConfig.rpc_endpoint`) says
`PLUG_IN@host:port[@host:port…]`; no flag, file or image sets it. The plug-in is never shipped.
"""

from __future__ import annotations

import ctypes
import os

from worker.errors import BackendMismatch
from worker.llama import library

VARIABLE = "TEST_LLORCH_DEVICE"


def register(setting: str | None = None) -> list[library.Device]:
    """Add the test devices to ggml's registry; none without a setting. Idempotent."""
    setting = setting or os.environ.get(VARIABLE)
    if not setting:
        return []
    plugin, *endpoints = setting.split("@")
    ggml = library.ggml()
    known = {device.description for device in library.devices() if device.registry == "RPC"}
    if set(endpoints) - known:
        add_server = _plugin(plugin).ggml_backend_rpc_add_server
        add_server.restype, add_server.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        for endpoint in endpoints:
            if endpoint in known:
                continue
            registry = add_server(endpoint.encode())
            if not registry:
                raise BackendMismatch(f"No test device answers at {endpoint}.")
            ggml.ggml_backend_register(registry)
    found = [device for device in library.devices() if device.registry == "RPC"]
    return [device for device in found if device.description in endpoints]


def _plugin(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise BackendMismatch(f"The test device's plug-in cannot be loaded: {error}.") from error
