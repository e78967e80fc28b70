"""Chat templates: they render as in transformers, and cannot do anything else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from worker.engine.text.chat_template import ChatTemplate
from worker.errors import InvalidRequest, ModelError
from worker.wire.work import ChatPrompt

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, *messages: Mapping[str, Any], **options: Any) -> str:
    prompt = ChatPrompt(messages, **options)
    return ChatTemplate(source, SPECIAL).read(prompt).text()


USER = {"role": "user", "content": "Hi & <bye>"}
TOOL = {"type": "function", "function": {"name": "f"}}
PART = {"type": "text", "text": "b"}


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
    assert render("{{ tools[0].function.name }}", USER, tools=(TOOL,)) == "f"


def test_a_generator_of_a_filter_is_a_list() -> None:
    source = "{{ tools | map(attribute='function') | map(attribute='name') | tojson }}"
    assert render(source, USER, tools=(TOOL, TOOL)) == '["f", "f"]'


def test_nothing_is_escaped_as_html() -> None:
    assert render("{{ (tools | tojson | safe) + '\"<' }}", USER) == 'null"<'
    assert render("{{ 'a' | safe + '<' }}{{ '<' | e + '<' }}", USER) == "a<&lt;<"


def test_undefined_values_add_nothing_to_a_text() -> None:
    assert render("{{ 'a' + messages[0].nothing + 'b' }}{{ nothing + 'c' }}", USER) == "abc"


TAKES_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_a_template_that_reads_no_parts_gets_their_text() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, PART]}
    assert render(TURNS, parts, {**parts, "role": "critic"}) == "<user>a\nb<critic>a\nb"
    reads = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    reads += "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
    assert render(reads.replace("[", "").replace("]", ""), parts) == "ab"
    only = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert render(only, parts, {"role": "user", "content": "c"}) == "abc"


def test_arguments_that_are_not_an_object_are_unchanged() -> None:
    source = TAKES_TOOLS + "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    source += "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    for arguments in ("[1]", "{", '{"a": NaN}', "", "[" * 5000):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert render(source, message) == json.dumps(arguments)


def test_variables_that_were_not_sent_are_undefined() -> None:
    source = "{{ enable_thinking is defined }}"
    assert render(source, USER) == "False"
    assert render(source, USER, template_kwargs={"enable_thinking": False}) == "True"


@pytest.mark.parametrize(
    ("content", "text"),
    [("It is ", "<assistant>It is "), ("", "<assistant>"), (None, "<assistant>")],
)
def test_the_last_message_is_continued_where_it_ends(content: str | None, text: str) -> None:
    final = {"role": "assistant", "content": content}
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(TURNS + "</s>", USER, final, **options) == f"<user>Hi & <bye>{text}"
    trims = TURNS.replace("m.content", "m.content | trim")
    assert render(trims + "</s>", USER, final, **options) == f"<user>Hi & <bye>{text.rstrip()}"


def test_an_answer_is_continued_in_its_last_part() -> None:
    final = {"role": "assistant", "content": [PART, PART]}
    assert render(TURNS + "</s>", final, continue_final_message=True) == "<assistant>b\nb"


@pytest.mark.parametrize(
    ("opens", "marks", "text"),
    [
        ("<assistant>", ("<think>\n", "</think>"), "<assistant><think>\n"),
        ("<assistant><think>", ("<think>\n", "</think>"), "<assistant><think>"),
        ("<assistant><think>\n", ("<think>", "</think>"), "<assistant><think>\n"),
        (
            "<assistant>\n<think>\n\n</think>\n\n",
            ("<think>\n", "</think>"),
            "<assistant>\n<think>\n",
        ),
        ("<assistant></think>", ("<think>", "</think>"), "<assistant><think>"),
        ("<|start|>it", ("<|start|>it<|channel|>", "<|end|>"), "<|start|>it<|channel|>"),
    ],
)
def test_reasoning_that_was_cut_off_is_continued(
    opens: str, marks: tuple[str, str], text: str
) -> None:
    final = {"role": "assistant", "content": "", "reasoning_content": "It </think> is "}
    source = f"{TURNS}{{% if add_generation_prompt %}}{opens}{{% endif %}}"
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    rendered = render(source, USER, final, reasoning_marks=marks, **options)
    assert rendered == f"<user>Hi & <bye>{text}It </think> is "


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="leaves out the last message"):
        render("{{ messages[0].content }}", USER, USER, continue_final_message=True)


def test_a_refusal_of_the_template_s_own_is_reported() -> None:
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
def test_injections_that_pass_the_check_do_nothing_in_the_sandbox(source: str) -> None:
    try:
        text = render(source, {"role": "user", "content": "__class__"})
    except (InvalidRequest, ModelError):
        return
    assert "class" not in text and len(text) < 1000


def test_a_template_with_a_syntax_error_is_refused() -> None:
    with pytest.raises(ModelError, match="not valid"):
        ChatTemplate("{% for %}", SPECIAL)
