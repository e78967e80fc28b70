"""The engine process, in which a request, by its seed, attempts what a hostile file would.

It stands for native code that such a file has taken over. Each attempt is made on an intake thread
and on the engine thread; the log has the outcome.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.confinement.seccomp import MACHINES, REFUSED
from worker.engine import process, start
from worker.llama.sampler import Sampler
from worker.observability.logs import get_logger

BREAKS_OUT = 665
_PTRACE_SEIZE, _PR_GET_DUMPABLE = 0x4206, 3


def native(name: str, *arguments: Any) -> None:
    number = REFUSED[name][list(MACHINES).index(platform.machine())]
    lib = ctypes.CDLL(None, use_errno=True)
    if lib.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")


def child() -> None:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def dumpable() -> None:
    if not ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(0, "not dumpable")


def socket_of(family: int, kind: int) -> Callable[[], Any]:
    return lambda: socket.socket(family, kind).close()


api = os.getppid()
ATTEMPTS: dict[str, Callable[[], Any]] = {
    "a foreign file is read": lambda: Path("stdout").read_bytes(),
    "a foreign folder is listed": lambda: os.listdir("."),
    "a file is written": lambda: Path("written").write_bytes(b"x"),
    "a folder is made": lambda: os.mkdir(f"made-{os.urandom(4).hex()}"),
    "the API's variables are read": lambda: Path(f"/proc/{api}/environ").read_bytes(),
    "the API's memory is opened": lambda: open(f"/proc/{api}/mem", "rb").close(),
    "a TCP socket is made": socket_of(socket.AF_INET, socket.SOCK_STREAM),
    "a UDP socket is made": socket_of(socket.AF_INET, socket.SOCK_DGRAM),
    "a Unix socket is made": socket_of(socket.AF_UNIX, socket.SOCK_STREAM),
    "a program is run": lambda: subprocess.run(["/bin/true"], check=True),
    "a process is made": child,
    "the API is traced": lambda: native("ptrace", _PTRACE_SEIZE, api, 0, 0),
    "the API's memory is read": lambda: native("process_vm_readv", api, None, 0, None, 0, 0),
    "the API is signalled": lambda: os.kill(api, 0),
    "the API is held by a descriptor": lambda: os.close(os.pidfd_open(api)),
    "the API's limits are changed": lambda: resource.prlimit(api, resource.RLIMIT_CORE),
    "memory is dumped": dumpable,
}
"""Attempts that succeed in an engine without walls if the worker runs as root."""


def break_out(where: str) -> None:
    for name, attempt in ATTEMPTS.items():
        try:
            attempt()
            refusal = None
        except OSError as error:
            refusal = error.errno
        get_logger().info("breakout", where=where, attempt=name, refusal=refusal)


class BreakingSampler(Sampler):
    def __init__(self, model: Any, sampling: Any, *rest: Any) -> None:
        super().__init__(model, sampling, *rest)
        self._breaks_out = sampling.seed == BREAKS_OUT
        if self._breaks_out:
            break_out("intake")

    def sample(self, context: Any, row: int) -> int:
        if self._breaks_out:
            self._breaks_out = False
            break_out("loop")
        return super().sample(context, row)


if __name__ == "__main__":
    vars(start)["Sampler"] = BreakingSampler
    process.main()
