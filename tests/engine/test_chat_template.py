"""Chat templates: transformers' rendering, and nothing else that a template may try."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.bundled import ASSET
from worker.engine.text.chat_template import ChatTemplate
from worker.errors import InvalidRequest, ModelError
from worker.wire.work import ChatPrompt

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, *messages: Mapping[str, Any], **options: Any) -> str:
    prompt = ChatPrompt(messages, **options)
    return ChatTemplate(source, SPECIAL).render(prompt)


USER = {"role": "user", "content": "Hi & <bye>"}


def test_the_bundled_model_s_template() -> None:
    source = json.loads((ASSET / "tokenizer_config.json").read_text())["chat_template"]
    expected = "<|im_start|>user\nHi & <bye><|im_end|>\n<|im_start|>assistant\n"
    assert render(source, USER) == expected
    assert render(source, USER, add_generation_prompt=False) + "<|im_start|>assistant\n" == expected


def test_the_environment_is_the_one_templates_are_written_for() -> None:
    source = """{{ bos_token }}{% for m in messages %}
    {% if loop.index0 > 0 %}{% break %}{% endif %}
{% generation %}{{ m.content | tojson }}{% endgeneration %}
{% endfor %}{{ tools is none }}{{ add_generation_prompt }}{{ extra }}{{ eos_token }}"""
    text = render(source, USER, USER, template_kwargs={"extra": "!"})
    assert text == '<s>"Hi & <bye>"TrueTrue!</s>'
    assert render("{{ strftime_now('%Y') }}", USER).isdigit()
    assert render("{{ {'b': 1, 'ä': 2} | tojson(indent=1) }}", USER) == '{\n "b": 1,\n "ä": 2\n}'


def test_whether_a_template_takes_tools() -> None:
    assert ChatTemplate("{% if tools %}{{ tools }}{% endif %}", {}).takes_tools
    assert not ChatTemplate("{{ messages }}", {}).takes_tools
    tool = {"type": "function", "function": {"name": "f"}}
    assert render("{{ tools[0].function.name }}", USER, tools=(tool,)) == "f"


def test_a_refusal_of_the_template_s_own_is_told() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", USER)


@pytest.mark.parametrize(
    "payload",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for c in [].__class__.__base__.__subclasses__() %}{% endfor %}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ (joiner|attr('__init__')).__globals__ }}",
        "{{ self.__init__.__globals__.__builtins__ }}",
        "{{ namespace.__init__.__globals__ }}",
    ],
)
def test_known_injections_are_refused_at_load(payload: str) -> None:
    with pytest.raises(ModelError, match="internal of Python"):
        ChatTemplate(payload, SPECIAL)


@pytest.mark.parametrize(
    "source",
    [
        "{% set n = '__cla' ~ 'ss__' %}{{ ''|attr(n) }}",
        "{% set n = ['__class__'] %}{{ ''[n[0]] }}",
        "{{ ''|attr(messages[0].content) }}",
        "{{ messages.append(1) }}",
        "{{ '%c' % 10 ** 200000 }}",
        "{{ 'a' * 10000000 }}",
        "{{ [0] * 10000000 }}",
    ],
)
def test_what_is_hidden_from_the_check_does_nothing_in_the_sandbox(source: str) -> None:
    try:
        text = render(source, {"role": "user", "content": "__class__"})
    except InvalidRequest:
        return
    assert "class" not in text and len(text) < 1000


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_endless_templates_end(source: str) -> None:
    template = ChatTemplate(source, SPECIAL)
    began = time.monotonic()
    with pytest.raises(InvalidRequest):
        template.render(ChatPrompt((USER,)))
    assert time.monotonic() - began < 15


def test_a_template_that_is_no_template_is_refused() -> None:
    with pytest.raises(ModelError, match="not valid"):
        ChatTemplate("{% for %}", SPECIAL)
