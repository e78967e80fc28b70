"""Embeddings of parts of pictures and sounds that were encoded before. Engine thread."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]
Key = tuple[str | None, bytes]
"""The request's cache salt (embeddings are reused only under the same), and the part's name."""


class Embeddings:
    """At most `most_bytes`; the least recently used are evicted, but not the newest."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._rows: OrderedDict[Key, Rows] = OrderedDict()

    @property
    def n_bytes(self) -> int:
        return sum([rows.nbytes for rows in self._rows.values()])

    def get(self, key: Key) -> Rows | None:
        rows = self._rows.get(key)
        if rows is not None:
            self._rows.move_to_end(key)
        return rows

    def put(self, key: Key, rows: Rows) -> None:
        """Keep the rows of a part that has none."""
        assert key not in self._rows
        self._rows[key] = rows
        while self.n_bytes > self.most_bytes and len(self._rows) > 1:
            self._rows.popitem(last=False)
