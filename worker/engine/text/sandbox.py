"""Jinja's sandbox in which time, memory and the size of each value are bounded.

A template comes from a downloaded file and is hostile until shown otherwise. Each value that it
makes is weighed when it is made: nothing becomes heavier than `MAX_WEIGHT`, and all together take
no more than `MAX_BYTES`. So native code, which nothing can interrupt, only ever walks through small
values; what could make a heavy one out of small ones in one step is measured before it runs. The
deadline ends everything else at its next line. Intake threads; each rendering has a meter of its
own.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from types import FrameType
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError

MAX_WEIGHT = 4_000_000
"""Of one value: the characters of all texts in it, and `_ITEM` for each value in it."""
MAX_BYTES = 512 * 2**20
"""Of all values that one rendering makes, also of those that it has dropped."""
MAX_NUMBER = 200_000
"""The largest number that a filter or a method takes: it may be a width."""
MAX_BITS = 16_384
"""Of an integer."""
_ITEM = 16
_CHANGES = ("append", "pop")
_MAX_MARK = 16
"""Characters of an indentation or a separator of JSON."""

_WIDTH = re.compile(r"[%:][^%{}a-zA-Z]*?(\d+)")
_PLACES = {"indent": "\n", "wordwrap": "", "urlize": "", "str.expandtabs": "\t"}
"""Where an answer may become longer than its text; a line, or an address, may be one character."""
_TAB = 8
_OPEN_WIDTH = re.compile(r"%[^a-zA-Z]*\*|:[^{}]*\{")
"""In a format: a width that comes out of the arguments."""


_CONTAINERS = (list, tuple, set, frozenset, dict)


class OutOfTime(Exception):
    pass


class _Meter:
    """What one rendering has made so far."""

    def __init__(self) -> None:
        self._bytes_left = MAX_BYTES
        self._weighed: dict[int, tuple[object, int]] = {}
        self._growing: dict[int, list[Any]] = {}

    def charge(self, value: Any) -> Any:
        """The value, which an operation of the template has just made; an iterator as a list.

        Raises:
            SecurityError: it is too heavy, or all values together are.
        """
        if isinstance(value, Iterator):
            value = list(islice(value, MAX_WEIGHT // _ITEM + 1))
        if isinstance(value, str) and type(value) is not str:
            value = str(value)  # Markup would escape whatever is joined to it
        self._bytes_left -= sys.getsizeof(value)
        if self._bytes_left < 0:
            raise SecurityError("its values take too much memory")
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise SecurityError("such large numbers are refused")
        self.weight(value)
        return value

    def charge_list(self, value: list[Any]) -> list[Any]:
        """A list that the template has written. It may grow until it is a part of something."""
        self.charge(value)
        self._growing[id(value)] = value
        return value

    def change(self, target: list[Any], method: str, *args: Any) -> Any:
        """`append` or `pop`.

        Raises:
            SecurityError: the list is not the template's own, or becomes too heavy.
        """
        weight = self.weight(target)
        if method == "append":
            weight += _ITEM + self._of_part(*args)
            check(weight)
        if id(target) not in self._growing:
            raise SecurityError("this list may not be changed")
        answer = getattr(target, method)(*args)
        self._weighed[id(target)] = (target, weight)
        self._bytes_left -= _ITEM
        return answer

    def weight(self, value: Any) -> int:
        """
        Raises:
            SecurityError: it is too heavy.
        """
        if isinstance(value, str):
            weight = len(value)
        elif isinstance(value, dict):
            weight = self._of_items(value, (*value.keys(), *value.values()))
        elif isinstance(value, _CONTAINERS):
            weight = self._of_items(value, value)
        else:
            weight = 1
        check(weight)
        return weight

    def _of_items(self, container: Any, items: Iterable[Any]) -> int:
        """A value may be in many others: each is weighed once, and kept, so that its id is."""
        if (known := self._weighed.get(id(container))) is not None:
            return known[1]
        weight = _ITEM * len(container)
        check(weight)
        kinds = set(map(type, items))
        if kinds == {str}:
            weight += sum(map(len, items))  # in native code: traced, a loop is slow
        elif any([issubclass(kind, (str, *_CONTAINERS)) for kind in kinds]):
            for item in items:
                weight += self._of_part(item)
                check(weight)
        check(weight)
        self._weighed[id(container)] = (container, weight)
        return weight

    def _of_part(self, item: Any) -> int:
        self._growing.pop(id(item), None)
        return self.weight(item)


_METER: ContextVar[_Meter] = ContextVar("_METER")


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Templates are compiled and rendered within this, on one thread.

    Raises:
        OutOfTime: at the next line of Python after `seconds`.
        SecurityError: a value is too large.
    """
    until = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if time.monotonic() > until:
            raise OutOfTime
        return None if frame.f_code.co_filename == __file__ else trace

    token, before = _METER.set(_Meter()), sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        _METER.reset(token)


class _Nothing(jinja2.Undefined):
    """What is not defined, joined to a text, adds nothing to it; templates leave fields out."""

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str | list) else super().__add__(other)

    __radd__ = __add__


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        # Folded constants would not be charged.
        super().__init__(undefined=_Nothing, optimized=False, **options)
        self.code_generator_class = _ChargingGenerator
        self.filters["tojson"] = _to_json
        self.filters |= {name: _charged(name, function) for name, function in self.filters.items()}

    @staticmethod
    def concat(parts: Iterable[Any]) -> str:
        """Joins the pieces of a template, a macro, a block or a `~`."""
        return str(_METER.get().charge("".join(_counted(parts))))

    @staticmethod
    def charge(value: Any) -> Any:
        return _METER.get().charge(value)

    @staticmethod
    def charge_list(value: list[Any]) -> list[Any]:
        return _METER.get().charge_list(value)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # The meter decides which lists may grow.
        if isinstance(obj, list) and attr in _CHANGES:
            return True
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "**", int(), int() if left.bit_length() * abs(right) > MAX_BITS:
                raise SecurityError("such large numbers are refused")
            case "*", int(), str() | list() | tuple():
                check(left * max(1, _METER.get().weight(right)))
            case "*", str() | list() | tuple(), int():
                check(right * max(1, _METER.get().weight(left)))
            case "+", str() | list() | tuple(), str() | list() | tuple():
                check(_METER.get().weight(left) + _METER.get().weight(right))
            case "%", str(), _:
                _check_format(left, right)
        return self.charge(super().call_binop(context, operator, left, right))

    def call(self, context: Any, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = inspect.unwrap(callee)  # jinja wraps the method `format` of texts
        owner = getattr(method, "__self__", None)
        if isinstance(owner, list) and method.__name__ in _CHANGES:
            return _METER.get().change(owner, method.__name__, *args)
        if isinstance(owner, str | bytes):
            args = _measured(f"str.{method.__name__}", (owner, *args), kwargs)[1:]
        return self.charge(super().call(context, callee, *args, **kwargs))


class _ChargingGenerator(CodeGenerator):
    """Compiles the values that jinja makes without asking the environment so that it is asked."""

    def _charging(
        self, visit: Callable[[Any, Frame], None], node: Any, frame: Frame, by: str = "charge"
    ) -> None:
        self.write(f"environment.{by}(")
        visit(node, frame)
        self.write(")")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: jinja2.nodes.List, frame: Frame) -> None:
        self._charging(super().visit_List, node, frame, "charge_list")

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Frame) -> None:
        self._charging(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._charging(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, jinja2.nodes.Slice):
            self._charging(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)


def check(weight: int) -> None:
    if weight > MAX_WEIGHT:
        raise SecurityError("it builds too large a value")


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose work is measured before, and whose answer after.

    What jinja passes before the value (the environment or a context) stays in its place.
    """
    passed = getattr(function, "jinja_pass_arg", None)
    first = 0 if passed is None else 1

    def charged(*args: Any, **kwargs: Any) -> Any:
        measured = _measured(name, args[first:], kwargs)
        return _METER.get().charge(function(*args[:first], *measured, **kwargs))

    if passed is not None:
        charged.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return charged


def _measured(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a filter or of a text's method, iterators as lists.

    Raises:
        SecurityError: the answer could be too large.
    """
    meter = _METER.get()
    args = tuple(meter.charge(arg) if isinstance(arg, Iterator) else arg for arg in args)
    value, *rest = args or ("",)
    options = [*rest, *kwargs.values()]
    numbers = [abs(v) for v in options if isinstance(v, int | float)]
    texts = [len(v) for v in options if isinstance(v, str)]
    if max(numbers, default=0) > MAX_NUMBER:
        raise SecurityError(f"{name} with such a large number is refused")
    match name:
        case "str.encode" | "str.translate" | "str.format_map" | "xmlattr":
            raise SecurityError(f"{name} is refused")
        case "join":
            check(meter.weight(value) + _length(value) * max(texts, default=0))
        case "str.join" if rest:
            check(meter.weight(rest[0]) + _length(rest[0]) * len(value))
        case "replace" | "str.replace" if len(rest) > 1:
            text, old, new = map(str, (value, *rest[:2]))
            check(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
        case "indent" | "wordwrap" | "urlize" | "str.expandtabs":
            n_places = str(value).count(_PLACES[name]) + 1
            check(len(str(value)) + int(n_places * max(*numbers, *texts, _TAB)))
        case "format" | "str.format":
            _check_format(str(value), options)
        case "tojson" if max((*numbers, *texts), default=0) > _MAX_MARK:
            raise SecurityError("such wide JSON is refused")
    return args


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _check_format(pattern: str, values: Any) -> None:
    weight = _METER.get().weight(values)
    if _OPEN_WIDTH.search(pattern):
        raise SecurityError("a field whose width is a value is refused")
    width = max((int(digits[:9]) for digits in _WIDTH.findall(pattern)), default=0)
    # A field that is named or numbered may take the same value many times.
    n_named = pattern.count("%(") + pattern.count("{")
    check((n_named + pattern.count("%")) * width + n_named * weight)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it; jinja's own filter escapes HTML characters."""
    check(max(map(len, separators or ("",))) * _METER.get().weight(value) // _ITEM)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return encoder.encode(value) if indent is None else "".join(_counted(encoder.iterencode(value)))


def _counted(parts: Iterable[Any]) -> Iterator[str]:
    """The parts as texts, which together are not too long."""
    meter, length = _METER.get(), 0
    for part in parts:
        meter.weight(part)
        text = str(part)
        length += len(text)
        check(length)
        yield text
