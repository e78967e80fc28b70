"""Plans and proofs on GPUs whose memory is really limited; nothing is computed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.devices.fixtures import SHAPES
from tests.system.vulkan.conftest import MakeCards, Prove

pytestmark = pytest.mark.long

TOO_MUCH, TOO_LITTLE = 3, 1
"""Number of layer outputs by which the compute buffer of a later card may differ from llama.cpp's
own estimate, which forgets on which card the first norm of its layers is."""
KINDS = [*SHAPES, "windowed", "packed", "encoder"]
Start = Callable[..., subprocess.Popen[str]]


def tell(what: str, shares: list[dict[str, Any]]) -> None:
    """Print a row of the table of `make vulkan-test`: planned bytes over allocated ones."""
    parts = [f"{share['planned']:,} / {share['held']:,}" for share in shares]
    planned, held = (sum(share[key] for share in shares) for key in ("planned", "held"))
    print(f"| {what} | {' · '.join(parts)} | {planned / held - 1:+.2%} |")


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("kind", ["discrete", "integrated"])
def test_a_card_holds_what_was_planned(
    kind: str, model: str, cards: MakeCards, prove: Prove
) -> None:
    found = prove(cards(f"{kind}:1200"), model)
    assert found.get("resident"), found
    assert found["watched"] == "device"
    [share] = found["shares"]
    tell(f"{kind} {model}", [share])
    assert share["device"] == "Vulkan0"
    assert share["planned"] == pytest.approx(share["held"], rel=0.01)


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("described", ["discrete:900", "discrete:900,discrete:1200"])
def test_each_card_of_a_set_holds_what_was_planned(
    described: str, model: str, cards: MakeCards, prove: Prove
) -> None:
    described += ",integrated:900"
    indices = list(range(described.count(",") + 1))
    found = prove(cards(described), model, vulkan_device=indices)
    assert found["resident"] and len(found["shares"]) == len(found["layers"]) == len(indices)
    tell(f"{described} {model}", found["shares"])
    for share in found["shares"]:
        over, tolerance = share["planned"] - share["held"], share["held"] * 0.01
        assert over <= tolerance + TOO_MUCH * found["layer_output"], share
        assert over >= -tolerance - TOO_LITTLE * found["layer_output"], share


def test_the_card_is_chosen_by_its_number(cards: MakeCards, prove: Prove) -> None:
    found = prove(cards("discrete:900,discrete:900"), "tied-q4", vulkan_device=[1])
    assert [share["device"] for share in found["shares"]] == ["Vulkan1"]
    error = prove(cards("discrete:900,integrated:900"), "tied-q4", vulkan_device=[2])
    assert error["exit_code"] == 4 and "--vulkan-device is 2" in error["message"]
    assert "1 = Vulkan1 (Test GPU 1)" in error["message"]


def test_what_does_not_fit_is_refused_before_the_load(cards: MakeCards, prove: Prove) -> None:
    error = prove(cards("discrete:280"), "tied-q4")
    assert error["code"] == "INSUFFICIENT_VRAM" and error["exit_code"] == 5
    assert "does not fit on Vulkan0" in error["message"] and "293,601,280" in error["message"]
    on_two = prove(cards("discrete:280,discrete:280"), "tied-q4", vulkan_device=[0, 1])
    assert on_two["resident"], "a model that fits on two only"


def test_memory_that_another_process_takes_is_not_there(
    cards: MakeCards, prove: Prove, start_proving: Start
) -> None:
    card = cards("discrete:310")
    with start_proving(card, "tied-q4") as other:
        assert other.stdin is not None and other.stdout is not None
        assert json.loads(other.stdout.readline())["resident"]
        error = prove(card, "tied-q4")
        assert error["code"] == "INSUFFICIENT_VRAM", error
        print("again", file=other.stdin, flush=True)
        assert json.loads(other.stdout.readline()) == {"resident": True}
        other.send_signal(signal.SIGKILL)
    assert prove(card, "tied-q4")["resident"], "a killed process gives all of it back"


def test_a_driver_without_a_memory_budget_is_watched_for_its_presence(
    cards: MakeCards, start_proving: Start
) -> None:
    with start_proving(cards("discrete:900:no-budget"), "wide-heads") as process:
        assert process.stdin is not None and process.stdout is not None
        assert json.loads(process.stdout.readline())["watched"] == "presence"
        print("again", file=process.stdin, flush=True)
        assert json.loads(process.stdout.readline()) == {"resident": True}
        process.kill()


def test_a_software_device_is_taken_only_where_it_is_allowed(
    cards: MakeCards, prove: Prove
) -> None:
    bare = {"without": "VK_INSTANCE_LAYERS"}
    error = prove(cards("discrete:900"), "wide-heads", **bare)
    assert error["exit_code"] == 4 and "needs a Vulkan device and there is none" in error["message"]
    assert "--allow-software-device" in error["message"]
    found = prove(cards("discrete:900"), "wide-heads", allow_software_device=True, **bare)
    assert found["resident"]


def test_a_model_with_an_operation_that_vulkan_lacks_is_refused(
    cards: MakeCards, prove: Prove
) -> None:
    """Mamba's scan, which Vulkan supports only for Mamba 2's sizes."""
    error = prove(cards("discrete:900"), "recurrent")
    assert error["code"] == "RESIDENCY_VIOLATION"
    assert "SSM_SCAN run on the host" in error["message"]
