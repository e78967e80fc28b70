"""The keywords of JSON schemas: which are enforced, and with what values. Any thread."""

from __future__ import annotations

import math

TYPES = frozenset("object array string number integer boolean null".split())
NOT_ENFORCED = frozenset(
    "not if then else dependentSchemas dependentRequired dependencies contains minContains "
    "maxContains uniqueItems unevaluatedProperties unevaluatedItems minProperties "
    "maxProperties $dynamicRef $recursiveRef".split()
)
"""Assertions that are not enforced. A keyword that is neither here nor handled by the compiler is
an annotation, as in JSON Schema."""
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
OF_TYPE = {
    "object": frozenset(
        "properties patternProperties additionalProperties required minProperties "
        "maxProperties propertyNames".split()
    ),
    "array": frozenset(
        "items prefixItems additionalItems minItems maxItems uniqueItems contains".split()
    ),
    "string": frozenset("pattern format minLength maxLength".split()),
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
}
"""Keywords by type. A schema without `type` that has keywords of only one means that one."""

LARGEST = 2**53 - 1
"""The largest integer that all JSON readers represent exactly; wider bounds are narrowed to it."""
MAX_COUNT = 1_000_000
MAX_LENGTH_OF_PATTERN = 10_000
"""The largest `minLength` beside a pattern. Together they may allow a single text, which the engine
writes out at once: that takes 0.2 s."""
_MAX_MULTIPLE = 1000


def is_type(value: object) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return len(kinds) > 0 and all(isinstance(kind, str) and kind in TYPES for kind in kinds)


def is_required(value: object) -> bool:
    names = value if isinstance(value, list) else [] if isinstance(value, bool) else [None]
    return all(isinstance(name, str) for name in names)


def says_nothing(name: str, value: object) -> bool:
    """Whether an assertion that is not enforced holds for every value anyway."""
    if name == "uniqueItems":
        return value is False
    return name == "propertyNames" and value in ({}, {"type": "string"}, True)


def bound(keyword: str, value: float) -> tuple[str, float] | None:
    """The bound to enforce: the same, or a narrower one; `None` if neither is possible."""
    is_lower = keyword.lower().endswith("minimum")
    if abs(value) > LARGEST:
        if is_lower != (value < 0):
            return None
        return ("minimum", -LARGEST) if is_lower else ("maximum", LARGEST)
    if keyword.startswith("exclusive") and value == int(value):
        # llguidance allows an excluded integer if the other bound is less than 1 away.
        step = max(1e-6, abs(value) * 1e-14)
        return ("minimum", value + step) if is_lower else ("maximum", value - step)
    return keyword, value


def has_wide_number(value: object) -> bool:
    """Whether a value has a number beyond `LARGEST`: llguidance rounds it, or does not survive."""
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, dict | list):
            parts += part.values() if isinstance(part, dict) else part
        elif isinstance(part, int | float) and abs(part) > LARGEST:
            return True
    return False


def is_small_multiple(value: float) -> bool:
    """Whether `multipleOf` has at most two decimals and compiles fast enough: the automaton has as
    many states as the value."""
    return 0 < value <= _MAX_MULTIPLE and math.isclose(value * 100, round(value * 100))
