"""A GPU for tests: llama.cpp's RPC device, which uses the real offload path on any machine.

`register` adds it to ggml's registry in this process, `play_gpu` makes the worker's own code treat
it as a CUDA device. Whole processes do both through the modules beside this one: `gpu_command`
replaces `llorch-cuda`, `gpu_child` its children. The product knows nothing of it, and the plug-in
is never shipped.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from worker.confinement import landlock, seccomp
from worker.devices import select
from worker.devices.residency import live_check
from worker.errors import ResidencyViolation
from worker.llama import library
from worker.wire.backends import BACKENDS
from worker.wire.engine_info import Residency

_ANSWER_SECONDS = 2.0


def register(setting: str) -> int:
    """Add the device of `PLUG_IN@host:port` to the registry once; returns its number among its
    kind."""
    plugin, endpoint = setting.split("@")
    found = _endpoints()
    if endpoint not in found:
        add_server = ctypes.CDLL(plugin).ggml_backend_rpc_add_server
        add_server.restype, add_server.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
        check_answers(endpoint)
        ggml = library.ggml()
        ggml.ggml_backend_register(add_server(endpoint.encode()))
        found = _endpoints()
    return found.index(endpoint)


def _endpoints() -> list[str]:
    return [device.description for device in library.devices() if device.registry == "RPC"]


def play_gpu(patch: Callable[[object, str, Any], None] = setattr) -> None:
    """Make `llorch-cuda`'s code use RPC devices, as if the wheel were one for CUDA."""
    really_check = live_check.check

    def check(selected: select.Selected, residency: Residency, *, locked: bool = False) -> None:
        for device in selected.devices:
            if device.registry == "RPC":
                # Through ggml, a dead device would end this process; and it always claims the same
                # free memory.
                check_answers(device.description)
                residency = replace(residency, buffers=())
        really_check(selected, residency, locked=locked)

    known = replace(BACKENDS["cuda"], registries=frozenset({"RPC"}))
    patch(select, "BACKENDS", {**BACKENDS, "cuda": known})
    patch(select, "wheel_stamp", dict)
    patch(live_check, "check", check)
    patch(landlock, "restrict", _cannot_bear)
    patch(seccomp, "restrict", _cannot_bear)


def _cannot_bear(*_: object) -> None:
    raise OSError(0, "the device is reached by TCP")


def check_answers(endpoint: str) -> None:
    """
    Raises:
        ResidencyViolation: nobody listens there.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise ResidencyViolation(f"The test device at {endpoint} is gone: {error}.") from error
