"""Which device a command gets, and the message if it gets none."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import clock
from tests.support.devices.fixtures import MakeConfig
from worker.devices import nvidia, select
from worker.errors import BackendMismatch
from worker.llama import library
from worker.wire.backends import BACKENDS, BackendName
from worker.wire.engine_settings import EngineSettings


def refused(config: Any) -> BackendMismatch:
    with clock.at_most(seconds=10), pytest.raises(BackendMismatch) as caught:
        select.select_device(config.settings)
    assert caught.value.exit_code == 4
    return caught.value


def wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: object) -> None:
    """Make the installed wheel look like one of another backend."""
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    monkeypatch.setattr(library, "folder", lambda: folder)


def device(**fields: Any) -> library.Device:
    [cpu] = [each for each in library.devices() if each.kind == "cpu"]
    return replace(cpu, **fields)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Replace this machine's devices by fake ones, with a wheel that does not say what it was built
    for."""

    def install(*devices: library.Device) -> None:
        wheel(tmp_path, monkeypatch)
        monkeypatch.setattr(library, "devices", lambda: list(devices))

    return install


def plugin(folder: Path, *needed: str) -> None:
    """A CUDA plug-in without code, which needs libraries of these names."""
    libraries = []
    for name in needed:
        libraries.append(str(folder / "elsewhere" / name))
        Path(libraries[-1]).parent.mkdir(exist_ok=True)
        soname = f"-Wl,-soname,{name}"
        subprocess.run(["c++", "-shared", soname, "-o", libraries[-1], *EMPTY], check=True)
    target = str(folder / "libggml-cuda.so")
    flags = ["-shared", "-Wl,--no-as-needed", "-o", target]
    subprocess.run(["c++", *flags, *EMPTY, "-x", "none", *libraries], check=True)


EMPTY = ("-x", "c++", "/dev/null")
CUDA = {"name": "CUDA0", "registry": "CUDA", "kind": "gpu", "description": "NVIDIA H100"}


def test_the_cpu_is_taken_without_a_device_to_offload_to(config: MakeConfig) -> None:
    selected = select.select_device(config("cpu").settings)
    assert selected.names == ("CPU",) and not selected.is_gpu


def test_the_cpu_variant_is_the_plugin_that_was_loaded(config: MakeConfig) -> None:
    variants = {path.name for path in library.folder().glob("libggml-cpu-*")}
    select.select_device(config("cpu").settings)
    found = select.cpu_variant()
    assert found is None if not variants else f"libggml-cpu-{found}.so" in variants


def test_the_cpu_variants_name_may_have_a_dot(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "load_backend: loaded CPU backend from /lib/libggml-cpu-armv8.2_1.so"
    monkeypatch.setattr(library, "startup_log", [line])
    select.select_device(config("cpu").settings)
    assert select.cpu_variant() == "armv8.2_1"


@pytest.mark.parametrize("backend", [name for name, each in BACKENDS.items() if each.on_gpu])
def test_a_gpu_command_on_a_cpu_wheel_names_what_is_there(
    backend: BackendName, config: MakeConfig, only: Any
) -> None:
    only(device())
    error = refused(config(backend))
    assert f"no {BACKENDS[backend].title} code" in error.message
    assert "Found: CPU (" in error.message
    assert error.details["found"] == ["CPU"]


def test_the_test_device_plays_the_gpu(config: MakeConfig, gpu: int) -> None:
    selected = select.select_device(config("cuda", cuda_device=gpu).settings)
    assert selected.names == ("RPC0",) and selected.is_gpu


@pytest.mark.parametrize(
    ("backend", "name"),
    [(backend, name) for backend, each in BACKENDS.items() for name in each.deceptive],
)
def test_a_variable_that_lends_a_device_other_memory_is_refused(
    backend: BackendName, name: str, config: MakeConfig, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert refused(config(backend)).message.startswith(f"{name} is set: ")
    assert not select.select_device(config("cpu").settings).is_gpu


def test_an_index_beyond_the_devices_names_them(config: MakeConfig, gpu: int) -> None:
    error = refused(config("cuda", cuda_device=gpu + 7))
    assert "0 = RPC0 (" in error.message
    assert error.details["device_index"] == gpu + 7


def test_the_cpu_command_on_a_wheel_with_a_gpu(config: MakeConfig, only: Any) -> None:
    only(device(), device(**CUDA))
    error = refused(config("cpu"))
    assert "needs a CPU wheel" in error.message and "CUDA0 (NVIDIA H100" in error.message


def test_the_cpu_command_on_a_cuda_wheel_without_a_gpu(
    config: MakeConfig, only: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(device())
    wheel(tmp_path, monkeypatch, **{"libggml-cuda.so": ""})
    assert "carries libggml-cuda.so" in refused(config("cpu")).message


@pytest.mark.parametrize(
    ("command", "built_for"), [("cpu", "cuda"), ("cuda", "cpu"), ("accelerate", "cpu")]
)
def test_a_wheel_that_was_built_for_another_backend_is_refused(
    command: str, built_for: str, config: MakeConfig, tmp_path: Path, monkeypatch: Any
) -> None:
    wheel(tmp_path, monkeypatch, **{"llorch-build.json": {"backend": built_for}})
    error = refused(config(command))
    assert f"built for {built_for}" in error.message and "Found: CPU (" in error.message
    assert error.details["wheel_backend"] == built_for


def test_accelerate_stays_off_the_metal_device_that_its_wheel_always_has(
    config: MakeConfig, only: Any
) -> None:
    only(device(), device(name="MTL0", registry="MTL", kind="gpu", description="Apple M3"))
    assert select.select_device(config("accelerate").settings).devices == ()


def test_a_missing_driver_is_reported_in_its_own_words(
    config: MakeConfig, only: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(device())
    plugin(tmp_path)
    line = "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected"
    monkeypatch.setattr(library, "startup_log", [line])
    assert "no CUDA-capable device is detected" in refused(config("cuda")).message


def test_a_hidden_gpu_names_the_variable_that_hides_it(
    config: MakeConfig, only: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(device())
    plugin(tmp_path)
    monkeypatch.setattr(library, "startup_log", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hint = "(CUDA_VISIBLE_DEVICES is ''; `nvidia-smi -L` lists the cards of this machine)"
    assert hint in refused(config("cuda")).message


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        ("libcuda.so.99", "belongs to the NVIDIA driver"),
        ("libcudart.so.99", "belongs to the CUDA runtime"),
        ("libcublas.so.99", "belongs to cuBLAS"),
        ("libvulkan.so.99", "is Vulkan's loader"),
        ("libother.so.9", "libother.so.9: cannot open shared object file"),
    ],
)
def test_a_plugin_that_does_not_load_names_the_library_that_it_lacks(
    lacking: str, words: str, config: MakeConfig, only: Any, tmp_path: Path
) -> None:
    only(device())
    plugin(tmp_path, lacking)
    message = refused(config("cuda")).message
    assert f"libggml-cuda.so cannot be loaded: {lacking}" in message and words in message


@pytest.mark.parametrize(
    "description",
    ["llvmpipe (LLVM 19.1.7, 256 bits)", "SwiftShader Device (Subzero)", "lavapipe"],
)
def test_a_software_renderer_is_not_a_gpu(description: str, config: MakeConfig, only: Any) -> None:
    only(
        device(),
        device(name="Vulkan0", registry="Vulkan", kind="gpu", description=description),
    )
    for backend in ("metal", "vulkan"):
        error = refused(config(backend))
        assert "software renderer" in error.message and description in error.message
    allowed = config("vulkan", allow_software_device=True)
    assert select.select_device(allowed.settings).names == ("Vulkan0",)


def test_a_device_of_the_kind_cpu_is_not_a_gpu(config: MakeConfig, only: Any) -> None:
    only(device(name="Vulkan0", registry="Vulkan", description="Some driver"))
    assert "software renderer" in refused(config("metal")).message


def test_one_of_two_gpus_is_taken_by_its_number(config: MakeConfig, only: Any) -> None:
    only(device(), device(**CUDA), device(**CUDA | {"name": "CUDA1"}))
    assert select.select_device(config("cuda", cuda_device=1).settings).names == ("CUDA1",)


def test_blas_that_the_wheel_does_not_have_is_refused(
    config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path, monkeypatch)
    assert "carries no BLAS plug-in" in refused(config("cpu", blas="on")).message


def test_a_blas_plugin_that_does_not_load_is_refused(
    config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path, monkeypatch)
    (tmp_path / "optional").mkdir()
    (tmp_path / "optional" / "libggml-blas.so").write_text("not a library")
    assert "libggml-blas.so cannot be loaded" in refused(config("cpu", blas="on")).message


@pytest.mark.parametrize(
    ("shown", "n_cards", "chosen", "then_shown", "index"),
    [
        (None, None, 0, "0", 0),
        (None, None, 3, "3", 0),
        (None, 4, 3, "3", 0),
        (None, 2, 3, None, 3),
        ("2,5", 8, 1, "5", 0),
        ("GPU-aaaa, GPU-bbbb", 2, 1, "GPU-bbbb", 0),
        ("2,5", 8, 7, "2,5", 7),
        ("", 8, 0, "", 0),
    ],
)
def test_only_the_chosen_card_is_shown_to_the_driver(
    shown: str | None,
    n_cards: int | None,
    chosen: int,
    then_shown: str | None,
    index: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the driver has no such card, it shows all cards, so that they can be named."""
    variable = "CUDA_VISIBLE_DEVICES"
    monkeypatch.setattr(nvidia, "count", lambda: n_cards)
    monkeypatch.setattr(library, "is_loaded", lambda: False)
    monkeypatch.setenv(variable, shown or "")
    if shown is None:
        monkeypatch.delenv(variable)
    select._show_only.cache_clear()
    try:
        settings = EngineSettings("cuda", cuda_device=(chosen,))
        assert select.hide_other_cards(settings) == (index,)
        assert select.hide_other_cards(settings) == (index,), "asked again"
        assert os.environ.get(variable) == then_shown
        for others in (
            EngineSettings("metal", metal_device=(chosen,)),
            EngineSettings("vulkan", vulkan_device=(chosen,)),
        ):
            assert select.hide_other_cards(others) == (chosen,)
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "as nvidia-smi counts"
    finally:
        select._show_only.cache_clear()
