"""The kinds of values that settings have. Pure data."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


def _separated(value: Any) -> Any:
    """`a,b` as variables write a list; a list that a flag or a file gave stays."""
    return (
        tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value
    )


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_separated)]
