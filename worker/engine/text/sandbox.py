"""Jinja's sandbox with bounds on what a template may build: no text, list or number grows past one.

A deadline cannot interrupt one call of a built-in function, and one call can fill the memory or
take for ever: so whatever makes large values out of small ones, and whatever walks through values
in native code, is measured before it runs. Threads of the intake.
"""

from __future__ import annotations

import inspect
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor
from jinja2.exceptions import SecurityError

MAX_OUTPUT_CHARS = 4_000_000
"""The most characters of one text."""
MAX_ITEMS = 200_000
"""The most items of a list, repetitions, and values inside a value that is turned into text."""

MAX_BITS = 16_384
"""Of an integer."""

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda item, values: item in values,
    "notin": lambda item, values: item not in values,
}
_WIDE_FIELD = re.compile(r"\d{6,}|\*")
"""In a format string: a width that is large, or that comes out of the arguments."""
_NAMED_FIELD = re.compile(r"\{\w")


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_printed, **options)
        self.filters |= {name: _bounded(name, function) for name, function in self.filters.items()}
        self.filters |= {"concat": _joined, "compare": _compared, "measured": _measured_literal}
        tests: dict[str, Any] = {**self.tests}
        self.tests |= {name: _bounded_test(function) for name, function in tests.items()}

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins the pieces of a template, a macro or a block."""
        return _joined(parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "**" if _exceeds(left) or _exceeds(right) or _bits(left) * abs(right) > MAX_BITS:
                raise SecurityError("the power of such large numbers is refused")
            case "*" if _bits(left) + _bits(right) > MAX_BITS:
                raise SecurityError("the product of such large numbers is refused")
            case "*":
                for value, times in ((left, right), (right, left)):
                    if isinstance(value, str | list | tuple) and isinstance(times, int):
                        _check(len(value) * times, value)
                        _check(0 if isinstance(value, str) else _check_nested(value) * times, [])
            case "+" if isinstance(left, str | list | tuple) and isinstance(right, type(left)):
                _check(len(left) + len(right), left)
            case "%" if isinstance(left, str):
                _check_format(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = inspect.unwrap(callee)  # jinja wraps the method `format` of texts
        owner = getattr(method, "__self__", None)
        match owner:
            case str():
                args = _measured(f"str.{method.__name__}", (owner, *args), kwargs)[1:]
            case bytes():
                raise SecurityError("bytes are refused")
            case list() | tuple() | Mapping() if any(map(_is_container, args)):
                _check_nested([owner, *args])
        answer = super().call(context, callee, *args, **kwargs)
        return _measured_literal(answer) if callee is dict else answer


def bound_operations(tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """The template with each concatenation, comparison, list, tuple and object as a filter, which
    can be measured; what jinja makes of them cannot."""
    nodes = jinja2.nodes

    def filtered(node: jinja2.nodes.Expr, name: str, *args: jinja2.nodes.Expr) -> Any:
        return nodes.Filter(node, name, [*args], [], None, None, lineno=node.lineno)

    class Visitor(jinja2.visitor.NodeTransformer):
        def visit_Concat(self, node: jinja2.nodes.Concat) -> Any:
            self.generic_visit(node)
            return filtered(nodes.List(node.nodes, lineno=node.lineno), "concat")

        def visit_Compare(self, node: jinja2.nodes.Compare) -> Any:
            self.generic_visit(node)
            if len(node.ops) == 1:
                left, right = node.expr, node.ops[0].expr
                if isinstance(left, nodes.Const) or isinstance(right, nodes.Const):
                    return node  # one side is a plain value
                name = nodes.Const(node.ops[0].op, lineno=node.lineno)
                return filtered(left, "compare", name, right)
            node.expr = filtered(node.expr, "measured")
            for each in node.ops:
                each.expr = filtered(each.expr, "measured")
            return node

        def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:
            self.generic_visit(node)
            return filtered(node, "measured") if node.items else node

        def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:
            self.generic_visit(node)
            return filtered(node, "measured") if node.ctx == "load" else node

        def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:
            self.generic_visit(node)
            return filtered(node, "measured") if node.items else node

    environment = tree.environment
    assert environment is not None, "a parsed template knows its environment"
    changed: jinja2.nodes.Template = Visitor().visit(tree)
    changed.set_environment(environment)
    return changed


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it; jinja's own filter escapes HTML characters."""
    _check_nested(value)
    if indent is not None and indent > 16:
        raise SecurityError("such a wide indentation is refused")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


# --- measuring ---------------------------------------------------------------------------------


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that its work is measured first.

    What jinja passes before the value (the environment or a context) stays in its place.
    """
    passed = getattr(function, "jinja_pass_arg", None)

    def bounded(*args: Any, **kwargs: Any) -> Any:
        first = 0 if passed is None else 1
        measured = _measured(name, args[first:], kwargs)
        return function(*args[:first], *measured, **kwargs)

    if passed is not None:
        bounded.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return bounded


def _measured(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a filter or of a text's method; raises an error if it would build too
    much."""
    if any(_exceeds(value) for value in (*args[1:], *kwargs.values())):
        raise SecurityError(f"{name} with such a large number is refused")
    value, *rest = args or ("",)
    match name:
        case "sort" | "unique" | "min" | "max" | "groupby" | "batch" | "slice" | "dictsort":
            return (_measured_literal(value if _is_container(value) else list(value)), *rest)
        case "sum" if any(map(_is_container, kwargs.values())) or any(map(_is_container, rest)):
            raise SecurityError("the sum of lists is refused")
        case "int" if isinstance(value, str) and len(value) > MAX_BITS // 8:
            raise SecurityError("such a long number is refused")
        case "str.encode":
            raise SecurityError("bytes are refused")
        case "join":
            between = rest[0] if rest else kwargs.get("d", "")
            return (_measured_parts(value, between), *rest)
        case "str.join" if rest:
            return (value, _measured_parts(rest[0], value))
        case "replace" | "str.replace" if len(rest) > 1:
            text, old, new = str(value), str(rest[0]), str(rest[1])
            _check(len(text) + (text.count(old) if old else len(text) + 1) * len(new), "")
        case "str.translate" if rest and isinstance(rest[0], Mapping):
            _check(len(str(value)) * max(map(_width, rest[0].values()), default=1), "")
        case "indent" | "str.translate" | "str.expandtabs":
            widest = max((v for v in (*rest, *kwargs.values()) if isinstance(v, int)), default=8)
            widest = max(widest, *(len(v) for v in rest if isinstance(v, str)), 8)
            _check(len(str(value)) * widest if len(str(value)) > 100 else 0, "")
        case "format" | "str.format" | "str.format_map":
            _check_format(str(value), [*rest, *kwargs.values()])
        case "string" | "pprint" | "urlize" | "escape" | "e" | "forceescape" | "tojson":
            _check_nested(value)
    return args


def _printed(value: Any) -> Any:
    """The value in `{{ }}`, before it becomes text."""
    if not isinstance(value, str):
        _check_nested(value)
    return value


def _measured_parts(value: Iterable[Any], between: Any) -> list[Any]:
    parts = list(value)
    others = [part for part in parts if not isinstance(part, str)]
    _check_nested(others)
    _check(sum(len(p) for p in parts if isinstance(p, str)) + len(str(between)) * len(parts), "")
    return parts


def _joined(parts: Iterable[Any]) -> str:
    texts, size = [], 0
    for part in parts:
        if not isinstance(part, str):
            _check_nested(part)
            part = str(part)
        size += len(part)
        _check(size, "")
        texts.append(part)
    return "".join(texts)


def _exceeds(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) > MAX_ITEMS


def _check(size: int, kind: object) -> None:
    if size > (MAX_OUTPUT_CHARS if isinstance(kind, str) else MAX_ITEMS):
        raise SecurityError("it builds too large a value")


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _width(value: Any) -> int:
    return len(value) if isinstance(value, str) else 1


def _is_container(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping | set | frozenset)


def _compared(left: Any, name: str, right: Any) -> Any:
    """Two containers are walked through together, in native code."""
    if _is_container(left) and _is_container(right):
        _check_nested([left, right])
    return _COMPARISONS[name](left, right)


def _bounded_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """One of jinja's tests, such as `eq` and `in`, which compare as `==` does."""
    passed = getattr(function, "jinja_pass_arg", None)

    def bounded(*args: Any) -> Any:
        if sum(map(_is_container, args)) > 1:
            _check_nested(args)
        return function(*args)

    if passed is not None:
        bounded.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return bounded


def _measured_literal(value: Any) -> Any:
    """Nothing can be nested without passing here, and so no value is large by being in it often."""
    if _is_container(value):
        _check_nested(value)
    return value


def _check_format(pattern: str, values: Any) -> None:
    if _WIDE_FIELD.search(pattern):
        raise SecurityError("a field of such a width is refused")
    _check_nested(values)
    # A field that is named or numbered may take the same value many times.
    n_times = pattern.count("%(") + len(_NAMED_FIELD.findall(pattern))
    _check(n_times * _n_chars(values), "")


def _n_chars(value: Any) -> int:
    """Of the texts in a value, which `_check_nested` has found small enough."""
    if isinstance(value, Mapping):
        return sum(map(_n_chars, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_n_chars, value))
    return _width(value)


def _check_nested(value: Any) -> int:
    """Count what a value's text would consist of: the same list may be in it many times over."""
    n_items = n_chars = 0
    open_values = [value]
    while open_values:
        each = open_values.pop()
        n_items += 1
        if isinstance(each, str):
            n_chars += len(each)
        elif isinstance(each, Mapping):
            open_values += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            open_values += each
        if n_chars > MAX_OUTPUT_CHARS:
            _check(n_chars, "")
        _check(max(n_items, len(open_values)), [])
    return n_items
