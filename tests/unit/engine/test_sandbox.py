"""A chat template cannot fill the memory or run forever, whatever it calls; valid ones still
work."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import resource
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.support import clock
from tests.support.pictures import picture
from worker.confinement.bounded import BoundedProgram
from worker.engine.media import decoder as decoder_module
from worker.engine.media.decoder import decoder
from worker.engine.text import chat_template
from worker.engine.text import renderer as renderer_module
from worker.engine.text.chat_template import ChatTemplate
from worker.engine.text.renderer import renderer
from worker.errors import InvalidRequest, ModelError
from worker.wire.work import ChatPrompt, Medium

HUNGRY = [
    "{{ range(99999)|join('x'*99999) }}",
    "{{ 'x'*99999*99999 }}",
    "{{ ('a'*99999).replace('', 'b'*99999) }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ 'x'|center(999999999) }}",
    "{{ ('a\\n'*9999)|indent(199999) }}",
    "{{ [[[[1]*99]]*99]|tojson(indent=199999) }}",
    "{{ [1]|batch(999999999, 0)|list }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
    "{% endfor %}{{ ns.s }}",
    "{% macro two(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='xx') %}"
    "{% for i in range(60) %}{% set ns.s = two(ns.s) %}{% endfor %}{{ ns.s }}",
    "{% set a = [['x'*999]*999]*999 %}{{ '%s' % ([a]*999,) }}",
    "{{ ('a'*39999).translate({97: 'x'*99999}) }}",
    "{% set s = 'x'*3999999 %}{{ " + " ~ ".join(["s"] * 3000) + " }}",
]
TWINS = (
    "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(60) %}{% set ns.s = NEST(ns.s) %}"
    "{% set ns.t = NEST(ns.t) %}{% endfor %}"
)
"""Two equal values of 2**60 items, each made of sixty lists; comparing them never ends."""
LISTS = TWINS.replace("NEST(ns.s)", "[ns.s, ns.s]").replace("NEST(ns.t)", "[ns.t, ns.t]")
BATCHES = TWINS.replace("NEST(ns.s)", "(ns.s + ns.s)|batch(2)|list").replace(
    "NEST(ns.t)", "(ns.t + ns.t)|batch(2)|list"
)
OBJECTS = TWINS.replace("NEST(ns.s)", "dict(a=ns.s, b=ns.s)").replace(
    "NEST(ns.t)", "dict(a=ns.t, b=ns.t)"
)
ENDLESS = [
    "{{ 10**999999999 }}",
    *(twins + "{{ ns.s == ns.t }}" for twins in (LISTS, BATCHES, OBJECTS)),
    LISTS + "{{ ns.s in [ns.t] }}{{ 1 < 2 < ns.s }}",
    LISTS + "{{ [ns.s, ns.t]|sort|length }}{{ [ns.s, ns.t]|min }}",
    LISTS + "{{ [ns.s]|select('eq', ns.t)|list|length }}{{ ns.s is eq(ns.t) }}",
    LISTS + "{{ [ns.s].index(ns.t) }}",
    "{% set ns = namespace(s=(1,)) %}{% for i in range(60) %}{% set ns.s = (ns.s, ns.s) %}"
    "{% endfor %}{{ {ns.s: 1} }}",
    "{% set ns = namespace(a=9) %}{% for i in range(60) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "{% set x = ('9'*3999999)|int(0, 32) %}{{ (x * x) % 7 }}",
    "{{ ([[0]*99999]*999)|sum(start=[])|length }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
]


def rendered(source: str) -> str:
    """Render once, without the probes of a new template."""
    template = ChatTemplate("{% if go %}" + source + "{% endif %}", {})
    chat = ({"role": "user", "content": "x"},)
    return template.read(ChatPrompt(chat, template_kwargs={"go": True})).text()


@pytest.mark.parametrize("source", HUNGRY)
def test_a_template_that_wants_all_memory_is_refused(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ModelError, InvalidRequest), match="chat template"):
        rendered(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_would_not_end_is_refused(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.2)
    monkeypatch.setattr(renderer_module, "_COMPILE_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises((ModelError, InvalidRequest), match="chat template"):
        rendered(source)
    assert clock.in_time(began, 20)


def test_values_that_a_running_template_keeps_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 20)
    slices = "{% set t = [" + ", ".join(["x[1:]"] * 99) + "] %}"
    for text in ("x[:-1]", "[0] * (199999 + loop.index)", "x ~ loop.index", "slices"):
        source = "{% if go %}{% set x = 'x'*3999998 %}{% set ns = namespace(p=none) %}"
        source += "{% for i in range(99999) %}"
        source += f"{{% set ns.p = namespace(p=ns.p, s={text}) %}}"
        source += (slices if text == "slices" else "") + "{% endfor %}{% endif %}"
        with pytest.raises(InvalidRequest, match="too much memory"):
            ChatTemplate(source, {}).read(ChatPrompt((), template_kwargs={"go": True})).text()


def test_a_chat_that_is_refused_changes_nothing_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether it was killed, ran out of memory or depth, or changed its own lists."""
    good = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    chat = ChatPrompt(({"role": "user", "content": "x"}, {"role": "user", "content": "y"}))
    for source in (ENDLESS[-1], HUNGRY[0], "{{ ([1] * 9)|tojson }}", "{{ messages.append(1) }}"):
        with contextlib.suppress(InvalidRequest), monkeypatch.context() as changed:
            if source == ENDLESS[-1]:
                changed.setattr(chat_template, "MAX_RENDER_SECONDS", 0.2)
            ChatTemplate("{% if messages %}" + source + "{% endif %}", {}).read(chat).text()
        assert good.read(chat).text() == "xy"
    os.kill(_server(renderer()), signal.SIGKILL)  # while it is idle
    time.sleep(0.2)
    assert good.read(chat).text() == "xy"


def _server(program: BoundedProgram) -> int:
    """Return the process that answers, which our child forks."""
    (own,) = psutil.Process(program.pid).children()
    return own.pid


def test_a_program_whose_parent_has_left_ends_at_once_and_silently(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Even while the process that answers is busy, or stopped."""
    program = BoundedProgram("worker.engine.text.renderer_child")
    program.ask(b'["", null]', 1)  # by then it has forked the answering process
    server, answers = psutil.Process(_server(program)), program._process.stdout
    server.suspend()
    assert answers is not None
    answers.close()
    assert program._process.wait(60) == 0
    assert not server.is_running()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("program", [renderer, decoder])
def test_the_process_that_answers_can_open_nothing(program: Callable[[], BoundedProgram]) -> None:
    picture_of(picture())  # by then it has limited itself
    ChatTemplate("x", {})
    links = Path(f"/proc/{_server(program())}/limits").read_text()
    assert re.search(r"Max open files +0 +0 ", links)
    assert re.search(r"Max file size +0 +0 ", links)
    assert re.search(r"Max core file size +0 +0 ", links)
    assert not re.search(r"Max address space +unlimited", links)


BOUNDED_ALREADY = """\
import resource
resource.setrlimit(resource.RLIMIT_AS, (200_000_000, 200_000_000))
from worker.engine.text.renderer import render
print(render("{{ a }}", {"a": "x"}, 5))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="without it, memory is not limited")
def test_an_existing_memory_limit_is_kept() -> None:
    """Set by `ulimit -v`; it must not be raised, which the system refuses."""
    command = [sys.executable, "-c", BOUNDED_ALREADY]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"x\n"


def _unread(program: BoundedProgram) -> int:
    """Return the bytes of requests that have not been read."""
    assert program._process.stdin is not None
    found = fcntl.ioctl(program._process.stdin, termios.FIONREAD, bytes(4))
    return int.from_bytes(found, "little")


def picture_of(encoded: bytes) -> object:
    return decoder().decode(Medium("image", encoded, "x"), 16_000, math.inf)


def test_a_decoder_that_hangs_or_dies_fails_only_its_medium(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = picture_of(picture())
    with monkeypatch.context() as changed:
        changed.setattr(decoder_module, "_SECONDS", 0.01)
        with pytest.raises(InvalidRequest, match="x: it takes too long"):
            picture_of(picture(1, (4000, 4000)))
    assert picture_of(picture()) == whole
    server = _server(decoder())
    os.kill(server, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(picture_of, picture())
        while not _unread(decoder()):
            time.sleep(0.01)
        os.kill(server, signal.SIGKILL)  # like a fault of native code
        with pytest.raises(InvalidRequest, match="x: it cannot be decoded"):
            pending.result()
    assert picture_of(picture()) == whole


def test_a_template_s_own_list_is_a_queue() -> None:
    source = "{% set ns = namespace(ids=[]) %}{% for i in range(3) %}"
    source += "{% set _ = ns.ids.append('n' ~ i) %}{% endfor %}{{ ns.ids.pop(0) }}{{ ns.ids }}"
    assert ChatTemplate(source, {}).read(ChatPrompt(())).text() == "n0['n1', 'n2']"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
        "{% if a %}" * 110 + "{% endif %}" * 110,
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
        "{{ 1" + "+1" * 9999 + " }}",
        "{{ f(a=1, a=2) }}",
        "{% macro f(a, a) %}{% endmacro %}",
        "{{ " + "9" * 9999 + " }}",
        "{% continue %}",
        "x" * 100_001,
    ],
)
def test_a_template_that_python_cannot_compile_is_not_valid(source: str) -> None:
    with pytest.raises(ModelError, match="the model's chat template"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ [1, 'a', none]|join('-') }}", "1-a-None"),
        ("{{ 'abc'|join(',') }}", "a,b,c"),
        ("{{ ', '.join(['a', 'b']) }}", "a, b"),
        ("{{ messages|map(attribute='role')|join(d='+') }}", "user"),
        ("{{ messages|join(', ', attribute='content') }}", "x"),
        ("{{ 'a' ~ 1 ~ none ~ [2] }}", "a1None[2]"),
        ("{{ 'aXbX'.replace('X', '--') }}{{ 'aXb'|replace('X', '') }}", "a--b--ab"),
        ("{{ '%s is %d' % ('x', 3) }}{{ '%02d'|format(7) }}{{ '{:>3}'.format(1) }}", "x is 307  1"),
        (
            "{{ [1, [2]] == [1, [2]] }}{{ 1 < 2 < 3 }}{{ messages[0] in messages }}",
            "TrueTrueTrue",
        ),
        ("{{ [3, 1]|sort }}{{ [1, 1]|unique|list }}{{ {'a': 1}|dictsort }}", "[1, 3][1][('a', 1)]"),
        ("{{ [1, 2]|sum }}{{ [1, 2, 3]|batch(2)|list }}{{ '7'|int * 6 }}", "3[[1, 2], [3]]42"),
        ("{{ 2 ** 10 }} {{ 3 * 'ab' }} {{ [1] * 2 + [3] }}", "1024 ababab [1, 1, 3]"),
        ("{{ messages[0]|tojson(indent=2) }}", '{\n  "role": "user",\n  "content": "x"\n}'),
        ("{% macro m(a) %}<{{ a }}>{% endmacro %}{{ m('b') }}{{ 'y'|indent(2, true) }}", "<b>  y"),
    ],
)
def test_usual_expressions_are_rendered(source: str, text: str) -> None:
    assert rendered(source) == text


@pytest.mark.parametrize(
    "source", ["{{ messages.properties.items() }}", "{{ messages[0].content.nothing() }}"]
)
def test_any_error_of_a_template_refuses_the_chat(source: str) -> None:
    with pytest.raises(InvalidRequest, match="template refuses"):
        rendered(source)
