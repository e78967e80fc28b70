"""HTTP surfaces around scripted supervisors, and supervisors over a scripted engine."""

from __future__ import annotations

from tests.support.scripted_api import scripted
from tests.support.supervised import script

__all__ = ["script", "scripted"]
