"""HTTP APIs over scripted supervisors."""

from __future__ import annotations

from tests.support.scripted_api import scripted

__all__ = ["scripted"]
