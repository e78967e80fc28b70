"""Finds the operations of a path. Pure data, any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from worker.api.http.operation import Dialect, Operation
from worker.errors import MethodNotAllowed, PathNotFound, WorkerError


@dataclass(frozen=True, slots=True)
class Place:
    dialect: Dialect
    operations: Mapping[str, Operation]
    """By method; empty if there is no such path."""
    parameters: Mapping[str, str]
    above: str = ""
    """The `api_below` of the page through which the path was found, or empty."""

    def missing(self, prefix: str) -> WorkerError:
        """The error for a request whose method has no operation here."""
        if not self.operations:
            return PathNotFound(f"there is no such path; {prefix}/openapi.json lists all paths")
        allowed = sorted(self.operations)
        message = f"this path does not accept that method, only {' and '.join(allowed)}"
        return MethodNotAllowed(message, allowed=allowed)


class Routes:
    """All operations of all dialects. Of two with the same path and method, the first wins."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        by_path: dict[str, tuple[Dialect, dict[str, Operation]]] = {}
        for dialect in dialects:
            for operation in dialect.operations:
                _, methods = by_path.setdefault(operation.path, (dialect, {}))
                for method in ("GET", "HEAD") if operation.method == "GET" else (operation.method,):
                    methods.setdefault(method, operation)
        self._fixed: dict[str, Place] = {}
        self._open: dict[str, tuple[str, Place]] = {}
        """Paths that end with a parameter: its name and the place, by the path's part before it."""
        for path, (dialect, methods) in by_path.items():
            place = Place(dialect, methods, {})
            before, _, parameter = path.partition("{")
            if parameter:
                assert parameter.endswith("}"), f"{path}: a parameter is the rest of a path"
                self._open[before] = parameter.removesuffix("}"), place
            else:
                self._fixed[path] = place
        rooted = [(each.root, each) for each in dialects if each.root is not None]
        self._roots = sorted(rooted, key=lambda found: -len(found[0]))
        self._above = [f"{each.api_below}/" for each in dialects if each.api_below is not None]

    def at(self, path: str) -> Place:
        place = self._fixed.get(path) or self._find(path)
        if place is not None:
            return place
        for above in self._above:
            rest = path.removeprefix(above)
            if rest != path and (place := self._find(f"/{rest}")) is not None:
                return replace(place, above=above.rstrip("/"))
        return self.nowhere(path)

    def nowhere(self, path: str) -> Place:
        return Place(self._nearest(path), {}, {})

    def _find(self, path: str) -> Place | None:
        if (place := self._fixed.get(path)) is not None:
            return place
        for before, (name, place) in self._open.items():
            if path.startswith(before):
                return replace(place, parameters={name: path.removeprefix(before)})
        return None

    def serves(self, operation: Operation) -> bool:
        """Whether no other operation has taken its path and method."""
        return self.at(operation.path).operations.get(operation.method) is operation

    def _nearest(self, path: str) -> Dialect:
        """The dialect with the longest root above `path`; for `*`, the one with the shortest."""
        found = (dialect for root, dialect in self._roots if f"{path}/".startswith(root))
        return next(found, self._roots[-1][1])
