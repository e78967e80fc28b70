"""Turns any fault of a checkpoint's files into an error of one sentence and bounded length."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worker.errors import ModelError

_MOST_CHARS = 1000
_FAULTS = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError),
    *(re.error, struct.error),
)
"""What code raises when it meets a value of an unexpected type."""


@contextmanager
def bounded_faults(source: Path) -> Iterator[None]:
    """Raise nothing but a `ModelError` for faults in the files below `source`."""
    try:
        yield
    except ModelError as error:  # It may quote a long value from a file.
        raise ModelError(_brief(error.message), **error.details) from error.__cause__
    except (*_FAULTS, MemoryError) as error:
        message = f"{source} is malformed: {type(error).__name__} {error}"
        raise ModelError(_brief(message), path=str(source)) from error


def _brief(sentence: str) -> str:
    sentence = " ".join(sentence.split())
    half = _MOST_CHARS // 2
    return sentence if len(sentence) <= 2 * half else f"{sentence[:half]} … {sentence[-half:]}"
