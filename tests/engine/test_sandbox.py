"""A chat template cannot fill the memory, whatever it calls; and what is right stays right."""

from __future__ import annotations

import resource

import pytest

from worker.engine.text.chat_template import ChatTemplate
from worker.errors import InvalidRequest
from worker.wire.work import ChatPrompt

HUNGRY = [
    "{{ range(99999)|join('x'*99999) }}",
    "{{ ('x'*99999).join(range(99999)|map('string')) }}",
    "{{ 'x'*99999*99999 }}",
    "{{ ([0]*99999)*99999 }}",
    "{{ ('a'*99999)|replace('a', 'b'*99999) }}",
    "{{ ('a'*99999).replace('a', 'b'*99999) }}",
    "{{ ('a'*99999).replace('', 'b'*99999) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d'|format(1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ 'x'.center(999999999) }}",
    "{{ 'x'|center(999999999) }}",
    "{{ '1'.zfill(999999999) }}",
    "{{ ('a\\n'*9999)|indent(199999) }}",
    "{{ [1]|tojson(indent=999999999) }}",
    "{{ [1]|batch(999999999, 0)|list }}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
    "{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
    "{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}"
    "{% endset %}{% set ns.s = t %}{% endfor %}{{ ns.s }}",
    "{% macro two(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='xx') %}"
    "{% for i in range(60) %}{% set ns.s = two(ns.s) %}{% endfor %}{{ ns.s }}",
    "{% set a = [['x'*999]*999]*999 %}{{ [a]*999|length }}{{ ([a]*999)|tojson }}",
    "{% set a = [['x'*999]*999]*999 %}{{ ([a]*999)|string }}",
    "{% set a = [['x'*999]*999]*999 %}{{ [a]*999 }}",
    "{% set a = [['x'*999]*999]*999 %}{{ '%s' % ([a]*999,) }}",
    "{{ 10**999999999 }}",
]


@pytest.mark.parametrize("source", HUNGRY)
def test_a_template_that_wants_all_memory_is_refused(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequest, match="template refuses"):
        template.render(ChatPrompt(({"role": "user", "content": "x"},)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


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
        ("{{ 2 ** 10 }} {{ 3 * 'ab' }} {{ [1] * 2 + [3] }}", "1024 ababab [1, 1, 3]"),
        ("{{ messages[0]|tojson(indent=2) }}", '{\n  "role": "user",\n  "content": "x"\n}'),
        ("{% macro m(a) %}<{{ a }}>{% endmacro %}{{ m('b') }}{{ 'y'|indent(2, true) }}", "<b>  y"),
    ],
)
def test_what_templates_do_gives_what_it_gave(source: str, text: str) -> None:
    prompt = ChatPrompt(({"role": "user", "content": "x"},))
    assert ChatTemplate(source, {}).render(prompt) == text


@pytest.mark.parametrize(
    "source", ["{{ messages.properties.items() }}", "{{ messages[0].content.nothing() }}"]
)
def test_any_error_of_a_template_refuses_the_chat(source: str) -> None:
    with pytest.raises(InvalidRequest, match="template refuses"):
        ChatTemplate(source, {}).render(ChatPrompt(({"role": "user", "content": "x"},)))
