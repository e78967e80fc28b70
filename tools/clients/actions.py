"""The table of actions: a client's name, what its user does, and the function that does it.

Imported by the runner in the clients' own environment, so nothing here may import the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Model = Literal["instruct", "bundled", "exact"]
"""`instruct`: SmolLM2-135M-Instruct · `bundled`: the tiny model, which can answer questions ·
`exact`: the same in single precision throughout."""


@dataclass(frozen=True, slots=True)
class Server:
    """The worker's base URL (without a path), and the model's name as users get it from
    `/v1/models`."""

    url: str
    model: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Action:
    client: str
    name: str
    model: Model
    run: Callable[[Server], None]
    """Raises if the action fails."""


ACTIONS: list[Action] = []


def action(
    client: str, name: str, model: Model = "instruct"
) -> Callable[[Callable[[Server], None]], Callable[[Server], None]]:
    """Register a function as one action."""

    def register(run: Callable[[Server], None]) -> Callable[[Server], None]:
        ACTIONS.append(Action(client, name, model, run))
        return run

    return register
