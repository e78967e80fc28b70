"""Numbers between two whole bounds, as grammar: decimal text knows no order, digits do.

Pure functions, any thread.
"""

from __future__ import annotations

_MORE_DIGITS = 18  # an integer that fits 64 bits


def integer_between(low: int | None, high: int | None) -> str:
    """All integers from `low` to `high`, both included; `None` is unbounded."""
    branches = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        branches.append(f'"-" ({_natural(least, None if low is None else -low)})')
    if high is None or high >= 0:
        branches.append(_natural(max(low or 0, 0), high))
    return " | ".join(branches)


def number_between(low: int | None, high: int | None) -> str:
    """All numbers from `low` to `high`, written without an exponent."""
    branches = []
    if low is None or low < 0:
        least = 0 if high is None or high >= 0 else -high
        branches.append(f'"-" ({_decimal(least, None if low is None else -low)})')
    if high is None or high >= 0:
        branches.append(_decimal(max(low or 0, 0), high))
    return " | ".join(branches)


def _decimal(low: int, high: int | None) -> str:
    fraction = '("." [0-9]{1,15})?'
    if high is None:
        return f"({_natural(low, None)}) {fraction}"
    last = f'"{high}" ("." "0"{{1,15}})?'
    return last if low == high else f"({_natural(low, high - 1)}) {fraction} | {last}"


def _natural(low: int, high: int | None) -> str:
    """Natural numbers from `low` to `high`, length by length."""
    digits = len(str(low))
    if high is None:
        top = 10**digits - 1
        longer = f"[1-9] [0-9]{{{digits},{max(_MORE_DIGITS, digits) - 1}}}"
        return f"{_natural(low, top)} | {longer}"
    branches = []
    while digits <= len(str(high)):
        least = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        most = min(high, 10**digits - 1)
        if least <= most:
            branches.append(_same_length(str(least), str(most)))
        digits += 1
    return " | ".join(branches)


def _same_length(low: str, high: str) -> str:
    """Digit strings from `low` to `high` of one length."""
    if not low:
        return '""'
    n_rest = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(high):
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return _join(f'"{low[0]}"', _same_length(low[1:], high[1:]))
    first, last = int(low[0]), int(high[0])
    branches = []
    if low[1:] != "0" * n_rest:
        branches.append(_join(f'"{first}"', _same_length(low[1:], "9" * n_rest)))
        first += 1
    tail = ""
    if high[1:] != "9" * n_rest:
        tail = _join(f'"{last}"', _same_length("0" * n_rest, high[1:]))
        last -= 1
    if first <= last:
        middle = f"[{first}-{last}]" if first < last else f'"{first}"'
        branches.append(f"{middle} [0-9]{{{n_rest}}}" if n_rest else middle)
    if tail:
        branches.append(tail)
    return f"({' | '.join(branches)})" if len(branches) > 1 else branches[0]


def _join(head: str, rest: str) -> str:
    return head if rest == '""' else f"{head} {rest}"
