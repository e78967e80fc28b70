"""Renders chat templates in processes whose time, memory and reach the kernel bounds.

A template comes from a downloaded file and is hostile until shown otherwise. This program forks one
that reads requests from the standard input. That one can open nothing, and is killed when the time
of a rendering is over, whatever native code it is in; then this one answers, and forks the next.
Without Linux, memory is bounded by that time alone.

A request is a line of JSON, `[source, variables, seconds of a processor]`, and so is the
answer, `[text, reason for a refusal]`. Without variables, the source is only compiled.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from worker.confinement import seccomp

MAX_CHARS = 4_000_000
"""Of a rendered chat."""
MAX_BYTES = 256 * 2**20
"""Of all memory that renderings take."""
_TOO_MUCH = "it needs too much memory"
_WARM_UP = r"{{ 'a\n' | indent | pprint }}{{ strftime_now('%c') }}{{ nothing.at_all }}"
"""Has Python open what it opens at the first text, filter and error."""
_ESCAPING = ("escape", "e", "forceescape", "safe", "urlize", "xmlattr")

Answer = tuple[str | None, str | None]
"""A text, or why there is none."""


# --- what a template may use -----------------------------------------------------------------


class _Nothing(jinja2.Undefined):
    """What is not defined, joined to a text, adds nothing to it; templates leave fields out."""

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str | list) else super().__add__(other)

    __radd__ = __add__


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; only its body
    is rendered."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.sandbox.SandboxedEnvironment:
    """As transformers makes it, but that lists may grow: templates use them as queues."""
    environment = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=_Nothing,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    for name in _ESCAPING:
        environment.filters[name] = _plain(environment.filters[name])
    return environment


def _plain(function: Callable[..., Any]) -> Callable[..., str]:
    """A filter whose answer is a plain text: Markup would escape whatever is joined to it."""

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
    """What a filter gives is a generator, which templates take for a list."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


# --- compiling and rendering -----------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template | str:
    """The template, or why it is none."""
    environment = _environment()
    try:
        tree = environment.parse(source)
        if internal := _internal(tree):
            return (
                f"it reaches for {internal!r}, an internal of Python; a file that does this is not "
                "to be trusted"
            )
        return environment.from_string(tree)
    except RecursionError:
        return "it is nested too deeply"
    except (jinja2.TemplateError, SyntaxError, ValueError) as error:
        return str(error)


def _internal(tree: jinja2.nodes.Template) -> str | None:
    """The first name with two leading underscores: a template could climb through them from a
    string to the interpreter, and no chat template needs one."""
    nodes = jinja2.nodes
    for node in tree.find_all((nodes.Getattr, nodes.NSRef, nodes.Getitem, nodes.Filter)):
        names: list[Any] = []
        if isinstance(node, nodes.Getattr | nodes.NSRef):
            names = [node.attr]
        elif isinstance(node, nodes.Getitem):
            names = [node.arg.value] if isinstance(node.arg, nodes.Const) else []
        elif isinstance(node, nodes.Filter) and node.name in ("attr", "map"):
            names = [a.value for a in node.args if isinstance(a, nodes.Const)]
            names += [k.value.value for k in node.kwargs if isinstance(k.value, nodes.Const)]
        for name in names:
            if isinstance(name, str) and name.startswith("__"):
                return name
    return None


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
            raise jinja2.TemplateError("it writes too long a text")
    return "".join(taken)


# --- processes ---------------------------------------------------------------------------------


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    _answer(_WARM_UP, {})
    while True:
        server = os.fork()
        if not server:
            _bound()
            _serve()
            os._exit(0)
        _, status = os.waitpid(server, 0)
        if not status:  # the input has ended
            return
        is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        _write((None, "it did not end within its time" if is_late else _TOO_MUCH))


def _bound() -> None:
    """Bound this process for good: its memory, what it opens, and what it asks of the kernel."""
    bounds = {resource.RLIMIT_NOFILE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    if sys.platform == "linux":
        with open("/proc/self/statm", "rb") as file:
            n_pages = int(file.read().split()[0])
        bounds[resource.RLIMIT_AS] = n_pages * resource.getpagesize() + MAX_BYTES
    for kind, most in bounds.items():
        resource.setrlimit(kind, (most, most))
    with contextlib.suppress(OSError):  # a kernel without it
        seccomp.restrict()


def _serve() -> None:
    for line in sys.stdin.buffer:
        source, variables, seconds = json.loads(line)
        del line
        # The signal's default action ends the process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            answer = _answer(source, variables)
        except MemoryError:
            os._exit(1)  # what is left of it would be in the way of the next
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answer)


def _answer(source: str, variables: Mapping[str, Any] | None) -> Answer:
    template = _compiled(source)
    if isinstance(template, str):
        return None, template
    return _rendered(template, variables) if variables is not None else ("", None)


def _write(answer: Answer) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
