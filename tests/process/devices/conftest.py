"""Tiny models of several shapes."""

from __future__ import annotations

from tests.support.devices.fixtures import models

__all__ = ["models"]
