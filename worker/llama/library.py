"""The only import of llama_cpp: loads the native library and its plug-ins, and collects its log.

Runs in the engine process and in short-lived command-line processes, never in the API process:
importing llama_cpp loads native code, which can crash its process.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

from worker.errors import BackendMismatch
from worker.installation import check_engine
from worker.lean_imports import without_init

LogLevel = Literal["debug", "info", "warning", "error"]
_LEVELS: dict[int, LogLevel] = {1: "debug", 2: "info", 3: "warning", 4: "error"}
_CONTINUED = 5

DeviceKind = Literal["cpu", "gpu", "igpu", "accelerator", "meta"]
_DEVICE_KINDS: dict[int, DeviceKind] = dict(enumerate(get_args(DeviceKind)))
"""Keyed by ggml's enum value."""


@dataclass(frozen=True, slots=True)
class Device:
    """One entry of the ggml device registry."""

    name: str
    """`CPU`, `CUDA0`, `Vulkan0`, `MTL0`, `RPC0`…"""
    description: str
    kind: DeviceKind
    registry: str
    """The backend that it belongs to: `CPU`, `CUDA`, `Vulkan`, `MTL`, `RPC`…"""
    handle: int
    """The native `ggml_backend_dev_t`."""

    @property
    def uses_host_memory(self) -> bool:
        """Whether its memory is the machine's own: an integrated GPU's, a Mac's."""
        return self.kind == "igpu" or self.registry == "MTL"


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    free_bytes: int
    """Equals `total_bytes` if the driver does not report how much is in use."""
    total_bytes: int
    """0 for a device without memory of its own."""
    pci_id: str | None = None
    """An address like `0000:c1:00.0`; `None` for a device that is not on a PCI bus."""


class Log:
    """llama.cpp's log, assembled into whole lines and passed to a listener.

    Only the log reports where buffers are placed, so the residency proof reads it (see `capture`).
    Native code logs from any of its threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._partial = ""
        self._level: LogLevel = "info"
        self._captures: list[list[str]] = []
        self.listener: Callable[[LogLevel, str], None] | None = None

    @contextmanager
    def capture(self) -> Iterator[list[str]]:
        """Collect every line that is logged inside the `with` block."""
        lines: list[str] = []
        self._captures.append(lines)
        try:
            yield lines
        finally:
            # Compared by identity: two empty captures are equal.
            self._captures = [c for c in self._captures if c is not lines]

    def write(self, level: int, text: str) -> None:
        with self._lock:
            if level != _CONTINUED:
                self._level = _LEVELS.get(level, "info")
            *whole, self._partial = (self._partial + text).split("\n")
            for line in whole:
                for lines in self._captures:
                    lines.append(line)
                if self.listener is not None and line.strip(" ."):
                    self.listener(self._level, line)


def reason(lines: Sequence[str]) -> str:
    """Why a native call failed: the first log line that mentions a failure, else the last one."""
    texts = [line.strip() for line in lines if line.strip()]
    for text in texts:
        if "error" in text or "failed" in text:
            return text.split(": ", 1)[-1]
    return texts[-1] if texts else "no reason was given"


log = Log()
startup_log: list[str] = []
"""The log of loading the plug-ins: names the CPU variant, and why a GPU driver cannot be used."""


@cache
def load() -> ModuleType:
    """The flat bindings (`llama_cpp.llama_cpp`), with plug-ins loaded and the log connected.

    Raises `BackendMismatch` if the wheel is absent, or no backend in it runs on this machine.
    """
    flat = bindings()
    flat.llama_log_set(log_callback(), None)
    # Without plug-ins in the wheel this does nothing; the built-in backends remain.
    with log.capture() as lines, _keeping_affinity():
        _ggml().ggml_backend_load_all_from_path(os.fsencode(folder()))
    startup_log.extend(lines)
    if _ggml().ggml_backend_dev_count() == 0:
        raise BackendMismatch(
            f"no backend of {folder()} runs on this machine's processor; use a wheel built for it"
        )
    flat.llama_backend_init()
    return flat


@cache
def log_callback() -> Any:
    """The callback to which native code passes each piece of its log."""

    @bindings().llama_log_callback  # type: ignore[untyped-decorator]
    def write(level: int, text: bytes, _user_data: Any) -> None:
        log.write(level, text.decode("utf-8", "replace"))

    return write


@cache
def bindings() -> ModuleType:
    """The bindings alone, which touch no device; raises `BackendMismatch` without a sound wheel."""
    check_engine()
    return imported("llama_cpp", "llama-cpp-python", "install the wheel of this backend")


def imported(module: str, what: str, remedy: str) -> ModuleType:
    """Import a module of llama_cpp; a failure raises `BackendMismatch` with `what` and `remedy`."""
    try:
        # The package's own `__init__` would import a whole application.
        with without_init("llama_cpp"), _keeping_affinity():
            return importlib.import_module(f"llama_cpp.{module}")
    except (ImportError, OSError, RuntimeError) as error:
        if folder := os.environ.get("LLAMA_CPP_LIB_PATH"):  # the bindings search it alone
            remedy = f"LLAMA_CPP_LIB_PATH is {folder!r}: unset it, or {remedy}"
        raise BackendMismatch(f"{what} cannot be loaded: {error}; {remedy}") from error


@contextmanager
def _keeping_affinity() -> Iterator[None]:
    """Restore the calling thread's CPU affinity after the block. With `OMP_PROC_BIND` and the like,
    OpenMP pins the thread that loads it; the CPU budget and later threads would inherit that."""
    cpus: set[int] = set()
    with suppress(AttributeError, OSError):  # other systems lack it, and some sandboxes forbid it
        cpus = os.sched_getaffinity(0)
    yield
    with suppress(OSError):
        if cpus and os.sched_getaffinity(0) != cpus:
            os.sched_setaffinity(0, cpus)


def on_abort(listener: Callable[[str], None]) -> None:
    """Call `listener` with the message when native code is about to abort this process.

    It is called on the thread that failed. When it returns, the process ends by SIGABRT.
    """
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    callback = prototype(lambda message: listener(message.decode("utf-8", "replace")))
    _kept_alive.append(callback)
    ggml().ggml_set_abort_callback(callback)


def sentence_of_abort(what: str, message: str) -> str:
    """The message for an abort; a {} in `what` is replaced by the file that is worked on."""
    place, _, reason = message.strip().partition(": ")
    return f"{what.format(_worked_on[-1])}: {reason or place}."


@contextmanager
def working_on(file: str) -> Iterator[None]:
    """Blame this file if native code aborts inside the block."""
    _worked_on.append(file)
    try:
        yield
    finally:
        _worked_on.pop()


_worked_on = ["the model"]
_kept_alive: list[Any] = []
"""Callbacks that native code can call until this process ends."""


def folder() -> Path:
    """The wheel's folder of shared libraries and plug-ins."""
    return Path(str(bindings().__file__)).parent / "lib"


class InitParams(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


@cache
def _ggml() -> ctypes.CDLL:
    """ggml's functions, which the bindings lack.

    They are looked up through libllama's own handle, which includes its dependencies. Opening
    `libggml.so` by name would map a second copy of it, with an empty backend registry.
    """
    lib = ctypes.CDLL("libllama", handle=bindings()._lib._handle)
    size_t, pointer, text = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
    for name, result, arguments in (
        ("ggml_type_name", text, [ctypes.c_int]),
        ("ggml_backend_load_all_from_path", None, [text]),
        ("ggml_backend_load", pointer, [text]),
        ("ggml_backend_register", None, [pointer]),
        ("ggml_backend_dev_count", size_t, []),
        ("ggml_backend_dev_get", pointer, [size_t]),
        ("ggml_backend_dev_name", text, [pointer]),
        ("ggml_backend_dev_description", text, [pointer]),
        ("ggml_backend_dev_type", ctypes.c_int, [pointer]),
        ("ggml_backend_dev_backend_reg", pointer, [pointer]),
        ("ggml_backend_dev_buffer_type", pointer, [pointer]),
        ("ggml_backend_dev_get_props", None, [pointer, pointer]),
        ("ggml_backend_dev_supports_op", ctypes.c_bool, [pointer, pointer]),
        ("ggml_backend_buft_name", text, [pointer]),
        ("ggml_backend_buft_get_alignment", size_t, [pointer]),
        ("ggml_backend_buft_get_alloc_size", size_t, [pointer, pointer]),
        ("ggml_backend_buft_alloc_buffer", pointer, [pointer, size_t]),
        ("ggml_backend_buffer_free", None, [pointer]),
        ("ggml_backend_reg_name", text, [pointer]),
        ("ggml_backend_reg_get_proc_address", pointer, [pointer, text]),
        ("ggml_set_abort_callback", pointer, [pointer]),
        ("ggml_version", text, []),
        ("ggml_commit", text, []),
        ("ggml_init", pointer, [InitParams]),
        ("ggml_reset", None, [pointer]),
        ("ggml_free", None, [pointer]),
        ("ggml_new_tensor", pointer, [pointer, ctypes.c_int, ctypes.c_int, pointer]),
        ("ggml_get_rows", pointer, [pointer, pointer, pointer]),
        ("ggml_mul_mat", pointer, [pointer, pointer, pointer]),
        ("ggml_mul_mat_id", pointer, [pointer, pointer, pointer, pointer]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def ggml() -> ctypes.CDLL:
    """ggml's functions; calls `load` first."""
    load()
    return _ggml()


@cache
def type_numbers() -> dict[str, int]:
    """ggml's enum value of each tensor type, keyed by its name in capitals: `F16`, `Q8_0`…"""
    numbers = range(bindings().GGML_TYPE_COUNT)
    return {_ggml().ggml_type_name(number).decode().upper(): number for number in numbers}


class HiddenStates(NamedTuple):
    """llama.cpp's functions for hidden states, the outputs of a model's last layer."""

    enable: Any
    """(context, on or off, whether only for rows with logits) → None."""
    row: Any
    """(context, row of the batch) → a pointer to the states of that row and those after it."""


@cache
def hidden_states() -> HiddenStates:
    """Look up the functions by their mangled C++ names, because they belong to no API. Raises
    `BackendMismatch` if this llama.cpp lacks them."""
    lib = ctypes.CDLL("libllama", handle=bindings()._lib._handle)
    try:
        enable = lib["_Z26llama_set_embeddings_nextnP13llama_contextbb"]
        row = lib["_Z30llama_get_embeddings_nextn_ithP13llama_contexti"]
    except AttributeError as error:
        raise BackendMismatch(
            f"--speculate mtp: this llama.cpp does not hand out hidden states ({error}); use the "
            "wheel that this worker is pinned to, or another --speculate"
        ) from error
    enable.restype, enable.argtypes = None, [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
    row.restype, row.argtypes = ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p, ctypes.c_int32]
    return HiddenStates(enable, row)


def trim_heap() -> None:
    """Return memory that the load has freed, such as a large vocabulary's text, to the system."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc would keep it
        trim(0)


def release_pages() -> None:
    """Release the mapped pages of model files. The load has read all of them; what it copied to a
    device or repacked for this processor is not read there again. Weights that are used in place
    come back from the page cache when they are next read. Locked pages stay."""
    try:
        maps = Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
    except OSError:  # not Linux, or a sandbox without /proc
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in maps.splitlines():
        addresses, rights, _ = line.split(maxsplit=2)
        if rights == "r--s":  # what llama.cpp maps; libraries are mapped private
            first, end = (int(address, 16) for address in addresses.split("-"))
            madvise(first, end - first, mmap.MADV_DONTNEED)


def devices() -> list[Device]:
    """The devices in ggml's registry. The devices themselves are not queried: that would initialise
    each of them and leave a context on it."""
    lib = ggml()
    found = []
    for index in range(lib.ggml_backend_dev_count()):
        handle = lib.ggml_backend_dev_get(index)
        registry = lib.ggml_backend_dev_backend_reg(handle)
        found.append(
            Device(
                name=lib.ggml_backend_dev_name(handle).decode(),
                description=lib.ggml_backend_dev_description(handle).decode(),
                kind=_DEVICE_KINDS.get(lib.ggml_backend_dev_type(handle), "accelerator"),
                registry=lib.ggml_backend_reg_name(registry).decode(),
                handle=handle,
            )
        )
    return found


class _Properties(ctypes.Structure):
    """`ggml_backend_dev_props`."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("capabilities", ctypes.c_bool * 5),
    ]


def properties_of(device: Device) -> DeviceProperties:
    """Queries the device itself; a driver that has lost it may end the process."""
    found = _Properties()
    ggml().ggml_backend_dev_get_props(device.handle, ctypes.byref(found))
    pci_id = found.device_id.decode() if found.device_id else None
    # If more is in use than the driver's budget, ggml's unsigned difference wraps around.
    free = found.memory_free if found.memory_free <= found.memory_total else 0
    return DeviceProperties(free, found.memory_total, pci_id)


def is_loaded() -> bool:
    """Whether `load` has run, so that native code has already looked for devices."""
    return load.cache_info().currsize > 0


def system_info() -> str:
    """The CPU features that the loaded backends use, as llama.cpp prints them."""
    info: bytes = load().llama_print_system_info()
    return info.decode()


def versions() -> dict[str, str]:
    """Versions by component. `llama_cpp_commit` is missing if the build did not embed it; our
    wheels have it in their stamp."""
    lib = ggml()
    commit = lib.ggml_commit().decode()
    return {
        "llama_cpp_python": version("llama-cpp-python").partition("+")[0],
        "ggml": lib.ggml_version().decode(),
        **({} if commit == "unknown" else {"llama_cpp_commit": commit}),
        "python": sys.version.split()[0],
    }
