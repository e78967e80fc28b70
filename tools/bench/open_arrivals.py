"""Open arrivals: requests come when they come, whether or not the server is done with the others.

The same seed gives each server the same requests at the same times. `arrivals` of `loads.py` is the
same on defaults, at a fixed rate.
"""

from __future__ import annotations

from tools.bench.loads import Load, arriving, read_throughput
from tools.bench.servers import Shape

SHAPE = Shape(slots=16, context_per_slot=1536)
CAPACITY = "capacity"
"""The load that finds out how many requests a second a server can bear: all at once."""


def capacity_load(count: int) -> Load:
    return Load(CAPACITY, SHAPE, arriving(count, None), read_throughput, timeout_s=600)


def open_load(percent: int, count: int, capacity: float) -> Load:
    """`percent` of a capacity in requests a second."""
    rate = capacity * percent / 100
    make = arriving(count, rate)
    return Load(f"open{percent}", SHAPE, make, read_throughput, timeout_s=900)
