"""A GPU for tests: llama.cpp's RPC device, which takes the real offload path on any machine.

Used only where `TEST_LLORCH_DEVICE` (or `EngineConfig.rpc_endpoint`) says
`PLUG_IN@host:port[@host:port…]`; no flag, file or image sets it. The plug-in is never shipped.
"""

from __future__ import annotations

import ctypes
import os
import socket

from worker.errors import BackendMismatch
from worker.llama import library

VARIABLE = "TEST_LLORCH_DEVICE"
_ANSWER_SECONDS = 2.0


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
            check_answers(endpoint)
            ggml.ggml_backend_register(add_server(endpoint.encode()))
    found = [device for device in library.devices() if device.registry == "RPC"]
    return [device for device in found if device.description in endpoints]


def check_answers(endpoint: str) -> None:
    """Asking a dead device through ggml would end this process.

    Raises:
        BackendMismatch: nobody listens there.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise BackendMismatch(f"No test device answers at {endpoint}: {error}.") from error


def _plugin(path: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(path)
    except OSError as error:
        raise BackendMismatch(f"The test device's plug-in cannot be loaded: {error}.") from error
