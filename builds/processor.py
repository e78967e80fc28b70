"""What this machine's processor can do, and the CMake flags of kernels compiled for it alone."""

import platform
from pathlib import Path

from builds.errors import BuildError

CPUINFO = Path("/proc/cpuinfo")
# ggml's x86 options (ggml/src/CMakeLists.txt), and the words of /proc/cpuinfo that each asks for.
X86_OPTIONS = {
    "SSE42": ("sse4_2",),
    "AVX": ("avx",),
    "F16C": ("f16c",),
    "FMA": ("fma",),
    "AVX2": ("avx2",),
    "BMI2": ("bmi2",),
    "AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "AVX512_VBMI": ("avx512vbmi",),
    "AVX512_VNNI": ("avx512_vnni",),
    "AVX512_BF16": ("avx512_bf16",),
    "AMX_TILE": ("amx_tile",),
    "AMX_INT8": ("amx_int8",),
}


def features() -> str:
    """The features of this machine's processor; its name where the system lists none."""
    if CPUINFO.is_file():
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            name, _, words = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return words.strip()
    return f"{platform.machine()} {platform.processor()}"


def native_flags() -> dict[str, str]:
    """The CMake flags of one CPU plug-in with all that this processor can do.

    llama.cpp refuses GGML_NATIVE for plug-ins on x86, because a plug-in tells by ggml's options
    whether it runs on a processor. So the options are set one by one, as its variants set them.
    """
    if platform.machine() != "x86_64":
        return {"GGML_NATIVE": "ON"}
    if not CPUINFO.is_file():
        raise BuildError(f"--native reads {CPUINFO}, which this system does not have.")
    have = features().split()
    flags = {
        f"GGML_{option}": "ON" if set(needed) <= set(have) else "OFF"
        for option, needed in X86_OPTIONS.items()
    }
    # Of the processors with both, no variant of llama.cpp's uses the narrower one.
    narrow = "avx_vnni" in have and flags["GGML_AVX512"] == "OFF"
    return {**flags, "GGML_AVX_VNNI": "ON" if narrow else "OFF"}
