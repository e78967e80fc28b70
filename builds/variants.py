"""Leaves out of a build those of llama.cpp's variants for processors that the compiler cannot make.

With `GGML_CPU_ALL_VARIANTS`, ggml compiles one plug-in for each generation of processors. A
compiler that does not know a generation's instructions would end the build, although the other
plug-ins serve its processors too, without those instructions.
"""

import re
from pathlib import Path

from builds import store, toolchain
from builds.errors import BuildError

LISTING = Path("vendor/llama.cpp/ggml/src/CMakeLists.txt")
# Features of the arm64 variants that a compiler may be too old for, and the flag that each is tried
# with. GCC knows SME since 14.
LATE = {"SME": "-march=armv9.2-a+sme"}
VARIANT = re.compile(
    r"^ *ggml_add_cpu_backend_variant\((?P<name>armv[\w.]+)(?P<features>[^)]*)\)\n", re.MULTILINE
)


def refused() -> list[str]:
    """The features of variants that the C++ compiler does not know, for its own target."""
    if not toolchain.target().startswith("aarch64-"):
        return []
    return [feature for feature, flag in LATE.items() if not toolchain.accepts(flag)]


def leave_out(source: Path, features: list[str]) -> None:
    """Take the variants with these features out of the unpacked sources, and say which."""
    text, left_out = without((source / LISTING).read_text("utf-8"), features)
    if not left_out:
        raise BuildError(f"{LISTING} does not list the arm64 variants as expected.")
    (source / LISTING).write_text(text, "utf-8")
    store.say(
        f"{toolchain.compiler()} does not know {', '.join(features)}: the wheel has no variants "
        f"{', '.join(left_out)}; their processors get the next best one"
    )


def without(listing: str, features: list[str]) -> tuple[str, list[str]]:
    """ggml's list without the variants that have one of the features, and the names of these."""
    left_out: list[str] = []

    def kept(line: re.Match[str]) -> str:
        if not set(features).intersection(line["features"].split()):
            return line[0]
        left_out.append(line["name"])
        return ""

    return VARIANT.sub(kept, listing), left_out
