"""What is wrong in the files of a checkpoint becomes a sentence of bounded length here."""

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
"""What a value of another type than its place has leads to, deep in a file."""


@contextmanager
def told(source: Path) -> Iterator[None]:
    """Raise nothing but `ModelError` for what the files below `source` say."""
    try:
        yield
    except ModelError as error:  # It may quote what a file says, which may be long.
        raise ModelError(_brief(error.message), **error.details) from error.__cause__
    except (*_FAULTS, MemoryError) as error:
        said = f"{source} is malformed: {type(error).__name__} {error}"
        raise ModelError(_brief(said), path=str(source)) from error


def _brief(sentence: str) -> str:
    sentence = " ".join(sentence.split())
    half = _MOST_CHARS // 2
    return sentence if len(sentence) <= 2 * half else f"{sentence[:half]} … {sentence[-half:]}"
