"""The commands that take all flags of the worker, and `llorch-convert`."""

from collections.abc import Mapping

SUBCOMMANDS: Mapping[str, str] = {
    "plan": "Print what the model would take of the device's memory; load nothing.",
    "chat": "Talk in the terminal to the running worker; start one if none runs, or for a model.",
    "bench": "Measure what this machine gives with this model, at 1, 4 and 16 streams.",
    "health": "Ask the running worker whether it is well; exit 0 if it is.",
    "doctor": "Look at everything that a start needs; exit 0 if it would succeed.",
}
"""Each subcommand's line in `--help`; each takes all flags of the worker."""
