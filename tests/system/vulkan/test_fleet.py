"""A fleet on the test GPU: each worker has the card that Ray reserved for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.fleet.running import on_this_machine
from tests.system.vulkan.conftest import MakeCards

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

FLEET = """
[[workers]]
name = "tiny"
backend = "vulkan"
replicas = 2

[workers.settings]
slots = 2
stall_timeout = 600
"""


def test_each_worker_of_a_fleet_has_a_card_of_its_own(cards: MakeCards, tmp_path: Path) -> None:
    """No card has room for two workers."""
    pytest.importorskip("ray", reason="needs Ray: pip install --requirement builds/locks/fleet.txt")
    seen = {
        **cards("discrete:300,discrete:300").environment(),
        "RAY_OVERRIDE_RESOURCES": '{"GPU": 2}',
    }
    with on_this_machine(tmp_path, FLEET, **seen) as running:
        lines = [process.cmdline() for process in running.children().values()]
    assert sorted(line[line.index("--vulkan-device") + 1] for line in lines) == ["0", "1"]
