"""The common prefix of two lists of tokens. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(a: Sequence[int], b: Sequence[int], most: int | None = None) -> int:
    """The length of the common prefix, at most `most`.

    Slices are compared in C. They grow while they are equal, so a short common prefix costs little,
    and halve from the first difference on.
    """
    end = min(len(a), len(b)) if most is None else min(len(a), len(b), most)
    low, size, grows = 0, 64, True
    while size and low < end:
        high = min(low + size, end)
        if a[low:high] == b[low:high]:
            low, size = high, size * 2 if grows else size
        else:
            size, grows = (high - low) // 2, False
    return low
