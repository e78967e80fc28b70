"""Runs inside the fresh venv of a smoke test, with only the wheel: prints JSON on stdout.

It is started as a script, so that no other package of the project can be imported.
"""

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import llama_cpp as flat

LIBRARIES = Path(llama_cpp.__file__).parent / "lib"
loaded_from: list[str] = []


@flat.llama_log_callback  # type: ignore[untyped-decorator]
def log(_level: int, text: bytes, _data: Any) -> None:
    """Only llama.cpp's log tells which variant of the CPU code was loaded."""
    line = text.decode(errors="replace")
    if line.startswith("load_backend: loaded"):
        loaded_from.append(Path(line.split(" from ")[-1].strip()).name)
    print(line, end="", file=sys.stderr)


def load_plugins() -> ctypes.CDLL:
    flat.llama_log_set(log, None)
    # Through libllama's own handle: opening a ggml library again would map a second, empty one.
    ggml = ctypes.CDLL("libllama", handle=flat._lib._handle)
    ggml.ggml_backend_load_all_from_path(str(LIBRARIES).encode())
    return ggml


def devices(ggml: ctypes.CDLL) -> list[dict[str, Any]]:
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    found = []
    for name in ("name", "description"):
        function = getattr(ggml, f"ggml_backend_dev_{name}")
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    for index in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(index)
        found.append(
            {
                "name": ggml.ggml_backend_dev_name(device).decode(),
                "description": ggml.ggml_backend_dev_description(device).decode(),
            }
        )
    return found


def one_token(model: str) -> dict[str, Any]:
    started = time.monotonic()
    llama = llama_cpp.Llama(model, n_ctx=64, n_gpu_layers=-1, n_threads=1, verbose=False)
    loaded = time.monotonic()
    made = llama.create_completion("Once upon a", max_tokens=1, temperature=0.0)
    return {
        "text": made["choices"][0]["text"],
        "tokens": made["usage"]["completion_tokens"],
        "load_ms": round((loaded - started) * 1000),
        "token_ms": round((time.monotonic() - loaded) * 1000),
    }


def main() -> int:
    ggml = load_plugins()
    found = devices(ggml)
    if not found:
        print("no backend of this wheel runs on this processor", file=sys.stderr)
        return 4
    report = {
        "build": json.loads((LIBRARIES / "llorch-build.json").read_text()),
        "devices": found,
        "plugins_loaded": loaded_from,
        "decoded": one_token(sys.argv[1]),
    }
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
