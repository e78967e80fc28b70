"""The faults, unenforced keywords and size of a schema, collected while it is compiled.

The limits protect native code from schemas that would take it long. Any thread.
"""

from __future__ import annotations

from worker.api.http.faults import MAX_FAULTS, Fault, fault

MAX_BYTES = 256_000
MAX_DEPTH = 48
MAX_SUBSCHEMAS = 2000
MAX_PROPERTIES = 500
"""In one object; twice as many in the whole schema."""
MAX_VALUES = 5000
"""In all `enum` and `const` together."""
MAX_TARGETS = 200
"""Different targets of `$ref`."""


class TooLarge(Exception):
    """A schema exceeds a limit."""


class SchemaReport:
    def __init__(self) -> None:
        self.not_enforced: list[str] = []
        """Paths of keywords that are not enforced."""
        self.faults: list[Fault] = []
        self._n_schemas = self._n_properties = self._n_values = 0

    def fault(self, path: str, constraint: str, message: str) -> None:
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(fault(path, constraint, message))

    def leave_out(self, path: str) -> None:
        if path not in self.not_enforced:
            self.not_enforced.append(path)

    def count_schema(self, depth: int) -> None:
        self._n_schemas += 1
        _check(self._n_schemas, MAX_SUBSCHEMAS, "it has more than {} parts")
        _check(depth, MAX_DEPTH, "it is more than {} levels deep")

    def count_properties(self, n: int) -> None:
        self._n_properties += n
        _check(n, MAX_PROPERTIES, "an object of it has more than {} properties")
        _check(self._n_properties, 2 * MAX_PROPERTIES, "it has more than {} properties")

    def count_required(self, n: int) -> None:
        _check(n, MAX_PROPERTIES, "an object of it requires more than {} properties")

    def count_values(self, n: int) -> None:
        self._n_values += n
        _check(self._n_values, MAX_VALUES, "it has more than {} values in enum and const")

    def count_target(self, n: int) -> None:
        _check(n, MAX_TARGETS, "its references have more than {} targets")


def _check(n: int, limit: int, message: str) -> None:
    if n > limit:
        raise TooLarge(message.format(limit))
