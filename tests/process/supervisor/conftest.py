"""The script of the engine that is supervised."""

from tests.support.supervised import script

__all__ = ["script"]
