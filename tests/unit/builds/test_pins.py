"""The pinned versions, and the flags of every backend."""

import platform
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from builds import compile, processor, store, wheels
from builds import pins as pinned
from builds.errors import BuildError
from tests import ROOT
from worker import installation


def test_the_worker_asks_for_the_release_that_is_pinned() -> None:
    assert pinned.pins().version == installation.ENGINE_RELEASE


def test_no_installer_compiles_the_engine_by_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    assert not any(each.startswith("llama") for each in wanted)


def test_architectures_come_from_the_pin_unless_given() -> None:
    default = pinned.recipe("cuda").cmake["CMAKE_CUDA_ARCHITECTURES"]
    assert default == ";".join(pinned.versions()["cuda"]["architectures"])
    wanted = pinned.versions()["cuda"]["architectures"]
    plain = [name for name in wanted if name.isdigit()]
    assert plain and not any(name.startswith("12") for name in plain), "PTX for later cards"
    recipe = pinned.recipe("cuda", architectures=("90-real",))
    assert recipe.cmake["CMAKE_CUDA_ARCHITECTURES"] == "90-real"


def test_a_variation_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BuildError, match="--arch does not apply to the cpu backend"):
        pinned.recipe("cpu", architectures=("90",))
    with pytest.raises(BuildError, match="--blas does not apply to the cuda backend"):
        pinned.recipe("cuda", blas=True)


def test_native_is_one_variant_and_comes_without_the_tests_plugin() -> None:
    everything, native = pinned.recipe("cpu"), pinned.recipe("cpu", native=True)
    assert native.test == () != everything.test
    assert native.ship != everything.ship


def test_a_native_wheel_depends_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys() -> list[str]:
        recipes = (pinned.recipe("cpu", native=native) for native in (False, True))
        return [wheels.key(recipe, pinned.pins()) for recipe in recipes]

    here = keys()
    monkeypatch.setattr(processor, "features", lambda: "another")
    there = keys()
    assert here[0] == there[0]
    assert here[1] != there[1]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="llama.cpp's options for x86")
def test_a_native_build_has_the_options_of_llama_cpps_variant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Features are named as in /proc/cpuinfo; the variants are those of ggml/src/CMakeLists.txt."""
    haswell = "sse4_2 avx f16c fma avx2 bmi2"
    skylake = f"{haswell} avx512f avx512cd avx512vl avx512dq avx512bw"
    machines = {
        haswell: "SSE42 AVX F16C FMA AVX2 BMI2",
        f"{haswell} avx_vnni": "SSE42 AVX F16C FMA AVX2 BMI2 AVX_VNNI",  # alderlake
        f"{haswell} avx512f": "SSE42 AVX F16C FMA AVX2 BMI2",
        skylake: "SSE42 AVX F16C FMA AVX2 BMI2 AVX512",
        # sapphirerapids
        f"{skylake} avx_vnni avx512vbmi avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8": (
            "SSE42 AVX F16C FMA AVX2 BMI2 AVX512 AVX512_VBMI AVX512_VNNI AVX512_BF16 "
            "AMX_TILE AMX_INT8"
        ),
    }
    for features, options in machines.items():
        monkeypatch.setattr(processor, "features", lambda features=features: features)
        flags = pinned.recipe("cpu", native=True).cmake
        on = {name for name, value in flags.items() if value == "ON"}
        assert on == {
            "GGML_BACKEND_DL",
            "LLAVA_BUILD",
            "LLORCH_QUICK",
            *(f"GGML_{option}" for option in options.split()),
        }
        assert flags["GGML_NATIVE"] == "OFF"


def test_a_change_of_repacking_compiles_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pins, recipe = pinned.pins(), pinned.recipe("cpu")
    before = compile.made_of(recipe, pins), wheels.key(recipe, pins)
    other = replace(pins, toolchain={**pins.toolchain, "patchelf": "0.1"})
    assert compile.made_of(recipe, other) == before[0]
    assert wheels.key(recipe, other) != before[1]


def test_a_comment_does_not_change_the_hash_of_code(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    hashes = []
    for text in ("x = 1\n", "# why\nx = 1\n", "x = 2\n"):
        code.write_text(text)
        hashes.append(store.code_hash(code))
    assert hashes[0] == hashes[1] != hashes[2]
