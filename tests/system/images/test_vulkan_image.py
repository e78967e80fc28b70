"""The Vulkan image on a GPU simulated by Mesa's software device: whole on it, or not started."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.system.images.conftest import image_size_bytes
from tests.system.images.container import Container, podman, running
from tools.gpu.cards import LAYER, layer

pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]
SHADER_SECONDS = 1800
"""The driver compiles each shader at its first use."""
CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 32,
}


@pytest.fixture(scope="module")
def worker(
    vulkan_image: str, tmp_path_factory: pytest.TempPathFactory, figures: dict[str, float]
) -> Iterator[Container]:
    """On one card of 600 MiB, with the host's layer and the image's loader and driver."""
    cards = tmp_path_factory.mktemp("cards")
    driver = podman(
        *("run", "--rm", "--entrypoint=python", vulkan_image, "-c"),
        "import pathlib as p; print(*p.Path('/usr/lib').glob('*/libvulkan_lvp.so'))",
    )
    icd = {"library_path": driver, "api_version": "1.3.0"}
    (cards / "card.json").write_text(json.dumps({"file_format_version": "1.0.0", "ICD": icd}))
    for folder in (cards, layer().parent):
        folder.chmod(0o755)
    environment = {
        "VK_DRIVER_FILES": "/cards/card.json",
        "VK_LAYER_PATH": "/layer",
        "VK_INSTANCE_LAYERS": LAYER,
        "VK_TEST_CARDS": "discrete:600",
        "LP_NUM_THREADS": "2",
    }
    options = [f"--env={name}={value}" for name, value in environment.items()]
    options += [f"--volume={cards}:/cards:ro", f"--volume={layer().parent}:/layer:ro"]
    flags = ("--slots", "2", "--context-length", "512", "--stall-timeout", str(SHADER_SECONDS))
    with running(vulkan_image, *flags, options=tuple(options)) as container:
        figures["vulkan_first_start_to_ready_ms"] = container.wait_for("/ready", SHADER_SECONDS)
        yield container


def test_the_whole_model_is_on_the_card(worker: Container) -> None:
    health = worker.get("/health").json()
    assert health["resident"] is True and health["device"] == "Vulkan0"
    assert worker.get("/info").json()["engine"]["build"]["backend"] == "vulkan"


def test_it_streams_a_story(
    vulkan_image: str, worker: Container, figures: dict[str, float]
) -> None:
    figures["vulkan_image_mb"] = image_size_bytes(vulkan_image) / 1e6
    worker.timed_story()  # the driver compiles the shaders for generation
    stream, figures["vulkan_first_token_ms"] = worker.timed_story()
    assert stream.end["tokens_out"] > 10


def test_it_answers_as_on_a_cpu(worker: Container) -> None:
    answer = worker.post("/v1/chat/completions", CHAT, SHADER_SECONDS).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_podman_sees_it_healthy(worker: Container) -> None:
    podman("healthcheck", "run", worker.name)


def test_sigterm_ends_it_in_time(worker: Container) -> None:
    """The last test of this worker."""
    began = time.monotonic()
    assert worker.stop() == 0
    assert time.monotonic() - began < 30  # --drain-timeout


def test_without_a_gpu_it_does_not_start(vulkan_image: str) -> None:
    """The image has Mesa's software device, but there is no GPU."""
    with running(vulkan_image) as container:
        assert podman("wait", container.name) == "4"
        assert "needs a Vulkan device and there is none" in container.logs()
