"""The types of the settings' values. Pure data."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _separated(value: Any) -> Any:
    """Split a text such as `a,b`, as in variables; a list from a flag or a file is kept."""
    return (
        tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value
    )


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_separated)]
