"""Compares two answers field by field; known differences are in `known.py`."""

from __future__ import annotations

import base64
import itertools
import math
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.differential import sdk_types
from tools.differential.asking import Asked
from tools.differential.known import ABSENT, reason_of

if TYPE_CHECKING:
    from tools.differential.servers import Pair


class Difference(NamedTuple):
    path: str
    """The field's path, without the indices of lists."""
    theirs: Any
    """`ABSENT` if only the worker has the field."""
    ours: Any
    answer: Any = None
    """The worker's whole answer."""


def differences(theirs: Any, ours: Any, path: str = "") -> Iterator[Difference]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in dict.fromkeys((*theirs, *ours)):
            at = f"{path}.{name}" if path else name
            their_value, our_value = (
                _plain(each.get(name, ABSENT), name) for each in (theirs, ours)
            )
            yield from differences(their_value, our_value, at)
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for their_item, our_item in zip(theirs, ours, strict=True):
            yield from differences(their_item, our_item, path + "[]")
    elif not _is_same(theirs, ours):
        yield Difference(path, theirs, ours)


class _Odds(dict[str, float]):
    """Probabilities by token; missing ones are almost 0, and the order of equal ones is
    arbitrary."""

    def get(self, name: str, default: object = None) -> float:
        return super().get(name, 0.0)


def _plain(value: Any, name: str) -> Any:
    """Decode vectors from base64, and key the probabilities of a draw by token."""
    if name == "top_probs":
        return _Odds({str(each["id"]): each["prob"] for each in value})
    if name == "embedding" and isinstance(value, str):
        return array("f", base64.b64decode(value)).tolist()
    return value


def _is_same(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, bool) or isinstance(ours, bool):
        return theirs is ours
    if isinstance(theirs, int | float) and isinstance(ours, int | float):
        return math.isclose(theirs, ours, rel_tol=1e-3, abs_tol=1e-3)
    return bool(theirs == ours)


@dataclass
class Report:
    n_asked: int = 0
    n_same: int = 0
    known: Counter[str] = field(default_factory=Counter)
    """How often each known reason for a difference occurred."""
    faults: dict[tuple[str, str], list[tuple[Asked, Difference]]] = field(default_factory=dict)

    def add(self, pair: Pair, n_requests: int, seed: int, only: str = "") -> None:
        made = itertools.islice(pair.requests(Random(seed)), 64 * n_requests)
        asked = (each for each in made if only in each.path)  # a pair may have no such path
        for each in itertools.islice(asked, n_requests):
            self.compare(pair, each)

    def compare(self, pair: Pair, asked: Asked) -> None:
        theirs, ours = pair.answers(asked)
        found = list(differences(theirs.comparable, ours.comparable))
        for fault in sdk_types.faults(asked, ours):
            place = (asked.path, f"an SDK's type: {fault}")
            each = Difference(place[1], None, None)
            self.faults.setdefault(place, []).append((asked, each))
        self.n_asked += 1
        self.n_same += not found
        if found and found[0].path == "status":
            found = found[:1]  # the answers have nothing in common
        for each in found:
            each = each._replace(answer=ours.comparable)
            if (why := reason_of(asked, each)) is not None:
                self.known[why] += 1
            else:
                self.faults.setdefault((asked.path, each.path), []).append((asked, each))

    def text(self, n_examples: int) -> str:
        lines = [f"{count:>6}  {why}" for why, count in self.known.most_common()]
        lines.append(f"{sum(map(len, self.faults.values()))} faults of {len(self.faults)} kinds")
        for (path, name), examples in self.faults.items():
            lines.append(f"{path}  {name}  ({len(examples)})")
            for asked, each in examples[:n_examples]:
                lines.append(f"    {asked}"[:900])
                lines.append(f"      llama-server: {each.theirs!r}"[:300])
                lines.append(f"      worker:       {each.ours!r}"[:300])
        return "\n".join(lines)
