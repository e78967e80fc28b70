"""The functions that a request offers, and those that it forces. Pure functions, any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.api.openai.structured.constraints import ForcedFunction


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request may call functions."""

    forced: str | None
    """The function that must be called; `"*"` for any of them, `None` for no obligation."""
    parallel: bool
    parameters: Mapping[str, Any]
    """The schema of each function's parameters, by the function's name."""

    @classmethod
    def of(
        cls, tools: Sequence[Mapping[str, Any]], forced: str | None = None, *, parallel: bool = True
    ) -> ToolUse:
        """The use of `tools`, which are in OpenAI's form."""
        functions = [tool["function"] for tool in tools]
        parameters = {function["name"]: function.get("parameters") for function in functions}
        return cls(forced, parallel, parameters)


def forced_functions(tools: Sequence[Mapping[str, Any]], forced: str) -> list[ForcedFunction]:
    """The function `forced`, or all functions for `"*"`."""
    return [
        ForcedFunction(
            function["name"], function.get("parameters"), f"tools[{index}].function.parameters"
        )
        for index, function in enumerate(tool["function"] for tool in tools)
        if forced in ("*", function["name"])
    ]
