"""What is wrong with a schema, what of it is not enforced, and how large it is. Any thread.

The limits protect native code from schemas that would take it long.
"""

from __future__ import annotations

from collections import Counter

from worker.api.http.faults import MAX_FAULTS, Fault, fault

MAX_BYTES = 256_000
MAX_DEPTH = 48
MAX_COUNTS = {
    "parts": 2000,
    "properties": 1000,
    "required names": 1000,
    "values in enum and const": 5000,
    "targets of references": 200,
}
"""In all schemas of a request together."""
MAX_PAIRS = 8192
"""Of branches that are compared; `oneOf`s beyond are not proven to be disjoint."""
MAX_NAMES = 500
"""In one object."""
_MAX_PATH_CHARS = 400
"""The rest of a longer path is cut: a client's names may be long, and many keywords below them."""


class TooLarge(Exception):
    """A schema exceeds a limit."""


class SchemaReport:
    def __init__(self) -> None:
        self.not_enforced: dict[str, None] = {}
        """Paths of keywords that are not enforced, in order."""
        self.faults: list[Fault] = []
        self._counts = Counter[str]()

    def fault(self, path: str, constraint: str, what: str) -> None:
        """In the message, `what` follows the path, as in "must be …"."""
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(fault(path, constraint, f"{path} {what}"))

    def leave_out(self, path: str) -> None:
        self.not_enforced[path] = None

    def count(self, n: int, what: str) -> None:
        self._counts[what] += n
        if self._counts[what] > MAX_COUNTS[what]:
            raise TooLarge(f"it has more than {MAX_COUNTS[what]} {what}")

    def count_names(self, n: int, what: str) -> None:
        if n > MAX_NAMES:
            raise TooLarge(f"an object of it has more than {MAX_NAMES} {what}")
        self.count(n, what)


def below(path: str, name: str) -> str:
    return f"{path}.{name}"[:_MAX_PATH_CHARS]
