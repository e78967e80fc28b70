"""The subcommands of `llorch-<backend>`, and the commands `llorch-convert` and `llorch-worker`."""

from collections.abc import Mapping
from typing import NamedTuple

_EXIT_CODES_OF_A_PLAN = (
    "2 usage or config, 3 model, 4 backend or device mismatch, 5 does not fit the device, "
    "6 download"
)
EXIT_CODES = f"{_EXIT_CODES_OF_A_PLAN}, 7 port in use, 8 engine crash loop"
"""Those that a start and most subcommands share."""


class Subcommand(NamedTuple):
    """What the command line knows of a subcommand before it imports its module."""

    text: str
    """Its line in `--help`."""
    groups: tuple[str, ...]
    """The groups of flags in its own help, by their keys in `flags.GROUPS`. It takes all flags."""
    exit_codes: str = f"0 done, 1 a fault of the worker, {EXIT_CODES}"
    needs_engine: bool = True
    """Whether it is refused without the backend's wheel of llama.cpp."""


_GROUPS_OF_A_PLAN = ("model", "device", "engine")
SUBCOMMANDS: Mapping[str, Subcommand] = {
    "plan": Subcommand(
        "Print how much of the device's memory the model would need, without loading it.",
        _GROUPS_OF_A_PLAN,
        f"0 done, 1 a fault of the worker, {_EXIT_CODES_OF_A_PLAN}",
    ),
    "chat": Subcommand(
        "Chat in the terminal with the running worker; start one if none runs, or for --model.",
        ("model", "server"),
        needs_engine=False,  # the running worker may be elsewhere
    ),
    "bench": Subcommand(
        "Measure tokens per second and latencies on this machine, at 1, 4 and 16 streams.",
        _GROUPS_OF_A_PLAN,
    ),
    "health": Subcommand(
        "Ask the running worker whether it is healthy; exit with 0 if it is.",
        ("server",),
        "0 the worker is healthy, 1 it is not or does not answer, 2 usage or config, "
        "4 backend mismatch",
        needs_engine=False,  # as for chat
    ),
    "doctor": Subcommand(
        "Check everything that a start needs; exit with 0 if it would succeed.",
        (*_GROUPS_OF_A_PLAN, "server"),
        needs_engine=False,  # it reports a missing wheel
    ),
}
