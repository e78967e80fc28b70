"""Random chat templates: each is rendered or clearly refused."""

from __future__ import annotations

import gc
import resource
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker.engine.text import chat_template
from worker.engine.text.chat_template import ChatTemplate
from worker.errors import InvalidRequest, ModelError
from worker.wire.work import ChatPrompt

n_cases = pytest.mark.parametrize("n_cases", [120, pytest.param(10_000, marks=pytest.mark.long)])


NO_CHECKS = list(HealthCheck)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", "", "<|im_end|>", "\x00", 2**64, -1, 1e308, "auto", "required"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


EXPRESSIONS = (
    "m.content", "m['role']", "m", "m.x.y", "tools | tojson", "t.function.parameters.properties",
    "t.function.parameters.properties.items()", "bos_token", "ns.a", "f(f)", "f()", "caller()",
    "loop.previtem.x.y", "loop(messages)", "loop.cycle()", "1 / 0", "'a' + 1", "x.y.z", "self",
    "[] | first | length", "raise_exception('no')", "strftime_now('%Y')", "messages | sort",
    "messages[::0]", "messages[9**99]", "range(10**9) | list", "'x' * 10**9", "'\\ud800'",
    "messages | groupby('role')", "messages | map('int') | sum", "tools[0]['function'] | items",
    "messages | map(attribute='content') | join", "messages[1].content.split('a')[3]",
    "namespace(a=m).a.a", "m.content | trim | upper", "m.content | int(base=99)", "-m.content",
    "messages[1].content | tojson(indent=4)", "'%d' % m.content", "lipsum(9)", "m | attr('x')",
    "ns.a == ns.b", "ns.a in [ns.b]", "[ns.a, ns.b] | sort", "[ns.a] | unique | list",
    "ns.a | string",
    "ns.a ** 9", "ns.a * ns.a", "(ns.a ~ 'x') * 9999", "{(ns.a, 1): 2}", "ns.a | batch(2) | list",
    "ns.a | map('upper') | join(ns.b)", "'%(a)s' % {'a': ns.a}", "ns.a | int(0, 36)",
    "ns.a is eq(ns.b)",
    "('a' * 9999) | wordwrap(1)", "('<' * 9999) | striptags | urlize", "ns.a | sum(start=[])",
    "'x'.encode()", "ns.a | replace('a', ns.b)", "ns.a.translate({97: ns.b})", "ns.a | pprint",
)  # fmt: skip


BLOCKS = (
    ("{% for m in messages %}", "{% endfor %}"),
    ("{% for t in tools recursive %}", "{% endfor %}"),
    ("{% for k, v in messages[1].items() %}", "{% endfor %}"),
    ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}", "{% endfor %}"),
    ("{% if m.content is string and tools %}", "{% else %}-{% endif %}"),
    ("{% macro f(m, x=1) %}", "{% endmacro %}{{ f(messages[1]) }}"),
    ("{% call f(1) %}", "{% endcall %}"),
    ("{% filter upper %}", "{% endfilter %}"),
    ("{% set ns = namespace(a=1) %}{% set ns.a = ns.a * 99999 %}", ""),
    ("{% set ns = namespace(a=[1], b=[1]) %}", ""),
    ("{% set ns = namespace(a='a', b='b' * 99999) %}", ""),
    (
        "{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}",
        "{% endfor %}",
    ),
    ("{% for i in range(40) %}{% set ns.a = ns.a * ns.a %}", "{% endfor %}"),
    (
        "{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}{% set ns.b = ns.b ~ ns.b %}",
        "{% endfor %}",
    ),
    ("{% for i in range(40) %}{% set ns.a = dict(a=ns.a, b=ns.b) %}", "{% endfor %}"),
    ("{% for i in range(99999) %}", "{% endfor %}"),
    (
        "{% for i in range(99999) %}{% set ns.a = namespace(a=ns.a, b='x' * 99999) %}",
        "{% endfor %}",
    ),
    ("{% set m %}", "{% endset %}"),
    ("{% generation %}", "{% endgeneration %}"),
    ("{% raw %}", "{% endraw %}"),
)


STRAYS = ("{% endfor %}", "{{", "%}", "{#", "{% include 'a' %}", "{{ m.__class__ }}", " text\n")


PIECES = st.recursive(
    st.sampled_from(EXPRESSIONS).map("{{{{ {} }}}}".format)
    | st.sampled_from(STRAYS[-1:] * 9 + STRAYS),
    lambda inner: st.tuples(st.sampled_from(BLOCKS), st.lists(inner, max_size=3)).map(
        lambda made: made[0][0] + "".join(made[1]) + made[0][1]
    ),
    max_leaves=8,
)


CONTENT = (
    st.none()
    | st.text()
    | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()}), max_size=3)
)


def tool(parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"odd": parameters}}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


RENDER_SECONDS = 0.1


SLACK_SECONDS = 1.0
"""CPU time: one call of a built-in function may begin just before the limit."""


def render_templates(n_cases: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Render random templates; returns the outcomes. No other exception may escape, and none may
    exceed its limit, which is short here."""
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", RENDER_SECONDS)
    counts = Counter[str]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    @settings(max_examples=n_cases, deadline=None, suppress_health_check=NO_CHECKS)
    @given(pieces=st.lists(PIECES, min_size=1, max_size=10), content=CONTENT, odd=ANYTHING)
    def render(pieces: list[str], content: Any, odd: Any) -> None:
        messages = ({"role": "user", "content": "x"}, {"role": "assistant", "content": content})
        callbacks = gc.callbacks[:]
        gc.callbacks.clear()  # hypothesis has a callback there, which a limit would interrupt
        try:
            template = ChatTemplate("".join(pieces), {})
            began = time.thread_time()
            template.read(ChatPrompt(messages, tools=(tool(odd),))).text()
            counts["rendered"] += 1
        except ModelError:
            counts["refused as a template"] += 1
            return
        except InvalidRequest as error:
            counts["cut" if "did not end" in error.message else "refused the chat"] += 1
        finally:
            gc.callbacks.extend(callbacks)
        assert time.thread_time() - began < RENDER_SECONDS + SLACK_SECONDS

    render()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 800_000  # KiB
    return dict(counts)


@n_cases
def test_made_up_templates(monkeypatch: pytest.MonkeyPatch, n_cases: int) -> None:
    counts = render_templates(n_cases, monkeypatch)
    print(counts)
    assert counts.keys() >= {"rendered", "refused the chat", "refused as a template"}
