"""The script of the supervised engine."""

from tests.support.supervised import script

__all__ = ["script"]
