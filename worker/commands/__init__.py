"""The subcommands of `llorch-<backend>`, and the commands `llorch-convert` and `llorch-worker`."""

from collections.abc import Mapping

SUBCOMMANDS: Mapping[str, str] = {
    "plan": "Print how much of the device's memory the model would need, without loading it.",
    "chat": "Chat in the terminal with the running worker, or with a new one if none runs.",
    "bench": "Measure tokens per second and latencies on this machine, at 1, 4 and 16 streams.",
    "health": "Ask the running worker whether it is healthy; exit with 0 if it is.",
    "doctor": "Check everything that a start needs; exit with 0 if it would succeed.",
}
"""Each subcommand's line in `--help`; each takes all flags of the worker."""
