"""Tiny models, and devices that stand in for GPUs."""

from __future__ import annotations

from tests.support.devices.fixtures import (
    config,
    devices_of_this_process,
    gpu,
    models,
    other_tests_devices,
    small_gpu,
)

__all__ = ["config", "devices_of_this_process", "gpu", "models", "other_tests_devices", "small_gpu"]
