"""A process that offers this machine's CPU as an RPC device, which stands in for a GPU in tests.

`python -m tests.support.devices.rpc_server PLUG_IN ENDPOINT FREE_BYTES`; `FREE_BYTES` is the
memory that the device claims to have; 0 means the real one. It serves until it is killed.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from worker.llama import library

_GET_MEMORY_SLOT = 2
"""Position of `get_memory` in ggml's table of device functions."""
_GET_MEMORY = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)


def main(plugin: str, endpoint: str, free_bytes: int) -> None:
    [cpu] = [device for device in library.devices() if device.kind == "cpu"]

    def claim(_device: int, free: Any, total: Any) -> None:
        free[0] = total[0] = free_bytes

    claim_native = _GET_MEMORY(claim)
    if free_bytes:
        table = ctypes.cast(cpu.handle, ctypes.POINTER(ctypes.c_void_p))
        table[_GET_MEMORY_SLOT] = ctypes.cast(claim_native, ctypes.c_void_p).value
    start = ctypes.CDLL(plugin).ggml_backend_rpc_start_server
    start.restype = None
    start.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    devices = (ctypes.c_void_p * 1)(cpu.handle)
    start(endpoint.encode(), None, 1, 1, devices)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
