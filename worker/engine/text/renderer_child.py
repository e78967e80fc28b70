"""Renders chat templates in processes whose time, memory and reach the kernel bounds (`bounded`).

A template comes from a downloaded file, and is assumed to be hostile. A request is
`[source, variables]` in JSON, and the answer `[text, reason for a refusal]`. Without variables, the
source is only compiled, and the text is a JSON array of the words in its expressions.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

from worker.confinement.bounded import serve

MAX_CHARS = 4_000_000
"""The limit of a rendered chat."""
MAX_BYTES = 256 * 2**20
"""The limit of the memory that a rendering takes."""
_MAX_WORD_CHARS = 64
"""A longer constant is not a word that a template would search for."""
_WARM_UP = r"{{ 'a\n' | indent | pprint }}{{ strftime_now('%c') }}{{ nothing.at_all }}"
"""Makes Python open the files that it opens at the first text, filter and error."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Cannot be encoded in UTF-8. A call's arguments are JSON in a text, which may spell one."""
_ESCAPING = ("escape", "e", "forceescape", "safe", "urlize", "xmlattr")

Answer = tuple[str | None, str | None]
"""A text, or why there is none."""


# --- what a template may use -----------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; only its body
    is rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Nothing(jinja2.Undefined):
    """An undefined value adds nothing to a text or list: templates join fields that are missing."""

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str | list) else super().__add__(other)

    __radd__ = __add__


def _environment() -> jinja2.sandbox.SandboxedEnvironment:
    """The same as transformers', except that lists may grow: templates use them as queues."""
    environment = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=_Nothing,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    for name in _ESCAPING:
        environment.filters[name] = _plain(environment.filters[name])
    return environment


def _plain(function: Callable[..., Any]) -> Callable[..., str]:
    """A filter that returns a plain text: `Markup` would escape whatever is joined to it."""

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> str:
        return str(function(*args, **kwargs))

    return plain


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it; jinja's own filter escapes HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: Any) -> list[Any]:
    """Filters return generators, which templates treat as lists."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


# --- compiling and rendering -----------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template | str:
    """The template, or why it is not valid."""
    environment = _environment()
    try:
        tree = environment.parse(source)
        if internal := _internal(tree):
            return (
                f"it accesses {internal!r}, an internal of Python; a file that does this must not "
                "be trusted"
            )
        return environment.from_string(tree)
    except RecursionError:
        return "it is nested too deeply"
    except (jinja2.TemplateError, SyntaxError, ValueError) as error:
        return str(error)


def _internal(tree: nodes.Template) -> str | None:
    """The first name with two leading underscores: a template could climb through them from a
    string to the interpreter, and no chat template needs one."""
    reaching = tree.find_all((nodes.Getattr, nodes.NSRef, nodes.Getitem, nodes.Filter))
    names = chain.from_iterable(map(_names, reaching))
    return next((name for name in names if isinstance(name, str) and name.startswith("__")), None)


def _names(node: nodes.Node) -> list[Any]:
    """The names that an expression accesses, as far as they are constants."""
    match node:
        case nodes.Getattr(attr=name) | nodes.NSRef(attr=name):
            return [name]
        case nodes.Getitem(arg=nodes.Const(value=name)):
            return [name]
        case nodes.Filter(name="attr" | "map"):
            arguments = [*node.args, *(each.value for each in node.kwargs)]
            return [each.value for each in arguments if isinstance(each, nodes.Const)]
    return []


def _words(source: str) -> list[str]:
    """The texts in a template's expressions, sorted and without duplicates."""
    constants = _environment().parse(source).find_all(nodes.Const)
    texts = {each.value for each in constants if isinstance(each.value, str)}
    return sorted(text for text in texts if text.strip() and len(text) <= _MAX_WORD_CHARS)


def _rendered(template: jinja2.Template, variables: Mapping[str, Any]) -> Answer:
    try:
        return _joined(template.generate(variables)), None
    except MemoryError:
        raise
    except RecursionError:
        return None, "it is nested too deeply"
    except Exception as error:  # the template's own code may raise anything
        return None, str(error) or type(error).__name__


def _joined(parts: Iterable[str]) -> str:
    taken, n_chars = [], 0
    for part in parts:
        taken.append(part)
        n_chars += len(part)
        if n_chars > MAX_CHARS:
            raise jinja2.TemplateError("the text that it writes is too long")
    text = "".join(taken)
    if half := _SURROGATE.search(text):
        code = ord(half[0])
        raise jinja2.TemplateError(f"it writes U+{code:04X}, half of a surrogate pair")
    return text


# --- requests ----------------------------------------------------------------------------------


def main() -> None:
    _answer(_WARM_UP, {})
    serve(_answered, MAX_BYTES)


def _answered(request: bytes) -> bytes:
    answer = json.dumps(_answer(*json.loads(request)), ensure_ascii=False)
    return answer.encode("utf-8", "replace")  # an error may quote a surrogate


def _answer(source: str, variables: Mapping[str, Any] | None) -> Answer:
    template = _compiled(source)
    if isinstance(template, str):
        return None, template
    if variables is None:
        return json.dumps(_words(source)), None
    return _rendered(template, variables)


if __name__ == "__main__":
    main()
