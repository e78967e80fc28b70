"""Answers split into reasoning, text and calls: as models write them, cut off, and as noise.
Answers with many log-probabilities, and jobs of clients that have left."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import math
import socket
import struct
import threading
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import httpx
import pydantic_core
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import clock
from tests.support.byte_runner import ByteRunner, make_sequence
from tests.support.scripted_api import ScriptedFactory, ScriptedWorker, story
from tests.support.worker import until
from tests.unit.api.answers import Message, deltas_of, message_of, parse, use_of
from tests.unit.api.model_outputs import CASES, HELLO, KIMI_CALL, ONE, R7B, TAG, TOOLS, TWO, Case
from tests.unit.api.round_trips import KINDS
from tests.unit.api.round_trips import source as template
from worker.api.chat.choice import Choice
from worker.api.chat.constrain.constrain import constrain
from worker.api.chat.delta import Arguments, Reasoning, Text
from worker.api.chat.parse.calls import ToolUse
from worker.api.chat.parse.conventions import conventions_of
from worker.api.chat.parse.parser import AnswerParser
from worker.api.chat.parse.tagged_calls import nested_value
from worker.api.chat.request import JsonSchema, Tool
from worker.api.dialects.openai.logprobs import completion_logprobs, prompt_offsets
from worker.engine.answers import Answers
from worker.errors import QueueFull
from worker.supervisor.job import Inbox, Job
from worker.wire.messages import (
    Finished,
    PromptProgress,
    PromptScored,
    Started,
    Token,
    TokenLogprob,
)

USE = use_of(TOOLS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.template}:{case.output[:30]!r}")
def test_known_outputs_are_parsed(case: Case) -> None:
    message = parse(case.output, template(case.template), USE, case.prompt_end)
    assert message.named == case.calls
    assert message.content == case.content and message.reasoning == case.reasoning
    ids = [call["id"] for call in message.calls]
    assert len(set(ids)) == len(ids)


INVOKE = '<invoke name="special">\n<parameter name="arg1">1</parameter>\n</invoke>'
PATH = ("get_time", {"city": 'C:\\{"it\'s" (a)\\'})
INTERN = (
    '<|action_start|><|plugin|>\n{"name": "special", "parameters": {"arg1": 1}}<|action_end|>\n'
)
QWEN = "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>"


@pytest.mark.parametrize(
    ("shown", "output", "calls"),
    [
        ("<function_calls>", f"<function_calls>\n{INVOKE}\n</function_calls>", ONE),
        ("<dots_function_call>", f"<dots_function_call>\n{INVOKE}\n</dots_function_call>", ONE),
        (
            "<function_calls>",
            "<function_calls>\nspecial(arg1=1)\nspecial_2(arg1=1, arg2=2)\n</function_calls>",
            TWO,
        ),
        (
            "<longcat_tool_call>",
            '<longcat_tool_call>{"name": "special", "arguments": {"arg1": 1}}</longcat_tool_call>',
            ONE,
        ),
        (
            "<|python_start|>",
            "<|python_start|>[special(arg1=1), "
            r'get_time(city="C:\\{\"it\'s\" (a)\\")]<|python_end|>',
            [*ONE, PATH],
        ),
        ("", "[special(arg1=1), special_2(arg1=1, arg2=2)]", TWO),
        (
            "<start_function_call>",
            "<start_function_call>call:special{arg1:1}<end_function_call>"
            '<start_function_call>call:get_time{city:<escape>C:\\{"it\'s" (a)\\<escape>}'
            "<end_function_call>",
            [*ONE, PATH],
        ),
        (
            "<|tool_call>",
            '<|tool_call>call:get_time{city:<|"|>C:\\{"it\'s" (a)\\<|"|>}<tool_call|>',
            [PATH],
        ),
        (f'Never write <function name="a">.\n{QWEN}', TAG, ONE),
        *((shown, INTERN, ONE) for shown in ("", "{{ '<|action_start|><|plugin|>' }}")),
    ],
)
def test_a_call_is_recognised_by_its_tag_or_by_its_form(
    shown: str, output: str, calls: list[tuple[str, Any]]
) -> None:
    message = parse(output, shown, USE)
    assert message.named == calls and message.content == ""


@pytest.mark.parametrize(
    ("shown", "tag"),
    [
        ("{% if '</thinking>' in content %}{% set mark = '</think>' %}{% endif %}", "think"),
        ("{{ content.split('</thought>')[-1] }}", "thought"),
    ],
)
def test_reasoning_is_recognised_by_the_templates_tag(shown: str, tag: str) -> None:
    """`<think>` is looked for first, because some templates remove the marks of others."""
    message = parse(f"Hm.\n</{tag}>\n\n{HELLO}", shown + QWEN, USE, f"<{tag}>\n")
    assert (message.content, message.reasoning) == (HELLO, "Hm.")


def test_calls_are_read_for_a_template_that_takes_no_tools() -> None:
    """In the template's form, and in the one that the engine's description asks for."""
    own = conventions_of("{% set tools = [] %}<|START_ACTION|>", takes_tools=False)
    for output in (
        '<tool_call>\n{"name": "special", "arguments": {"arg1": 1}}\n</tool_call>',
        '<|START_ACTION|>[{"tool_name": "special", "parameters": {"arg1": 1}}]<|END_ACTION|>',
    ):
        assert message_of(deltas_of(AnswerParser(own, USE), output)).named == ONE


HERMES_CALL = '<tool_call>\n{"name": "edit", "arguments": {"filename": "a.py", "old": "x'
CODER_CALL = "<function=edit>\n<parameter=filename>\na.py\n</parameter>\n<parameter=old>\nx y"


@pytest.mark.parametrize(
    ("name", "output", "arguments"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", HERMES_CALL, '{"filename": "a.py", "old": "x'),
        ("Qwen3-Coder", CODER_CALL, '{"filename": "a.py", "old": "x y'),
        ("unsloth-mistral-Devstral-Small-2507", '[TOOL_CALLS]edit[ARGS]{"fil', '{"fil'),
        ("Kimi-K2-Thinking", KIMI_CALL + '{"arg1": -1.', '{"arg1": -1.'),
        ("Kimi-K2-Thinking", KIMI_CALL + '{"arg1": Tru', '{"arg1": "Tru'),
        (
            "openai-gpt-oss-120b",
            '<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{"fi',
            '{"fi',
        ),
    ],
)
def test_a_call_that_is_cut_off_stays_a_call(name: str, output: str, arguments: str) -> None:
    (call,) = parse(output, template(name), USE).calls
    assert call["name"] in ("edit", "special") and call["arguments"] == arguments
    assert isinstance(pydantic_core.from_json(arguments, allow_partial=True), dict)


@pytest.mark.parametrize("case", [case for case in CASES if case.calls])
def test_a_limit_after_a_call_leaves_no_piece_of_a_mark_or_of_another_call(case: Case) -> None:
    whole = parse(case.output, template(case.template), USE, case.prompt_end)
    for n_chars in range(len(case.output)):
        parser = AnswerParser(conventions_of(template(case.template)), USE, case.prompt_end)
        deltas = parser.feed(case.output[:n_chars])
        found = message_of([*deltas, *parser.finish(is_cut=True)])
        assert not found.calls or whole.content.startswith(found.content)
        for call, begun in zip(whole.calls, found.calls, strict=False):
            assert begun["arguments"].count("<") <= call["arguments"].count("<")


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", HERMES_CALL, '"}}'),
        ("Qwen3-Coder", CODER_CALL, "\n</parameter>\n</function>"),
        (
            "meetkai-functionary-medium-v3.2",
            "all\n>>>python\nprint(1",
            ')\n>>>get_time\n{"city": "a"}',
        ),
        (
            "openai-gpt-oss-120b",
            "<|channel|>commentary to=functions.special<|message|>print(1",
            ")<|call|>",
        ),
    ],
)
def test_a_parser_is_in_a_call_until_its_end(name: str, begin: str, end: str) -> None:
    """Only the mark after it ends code, or a custom tool's plain text."""
    use = use_of(TOOLS, custom="special")
    for text, is_in_call in ((begin, True), (begin + end, False)):
        parser = AnswerParser(conventions_of(template(name)), use)
        deltas_of(parser, text)
        assert parser.is_in_call == is_in_call


@pytest.mark.parametrize(
    ("name", "output"),
    [
        (
            "Qwen-Qwen2.5-7B-Instruct",
            '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        ),
        ("Qwen-Qwen2.5-7B-Instruct", '<tool_call>{"name": "edit", "arguments": "a"}</tool_call>'),
        ("Qwen-Qwen2.5-7B-Instruct", '<tool_call>{"name": "edit", "arguments": 5}</tool_call>'),
        ("Qwen-Qwen2.5-7B-Instruct", "<tool_call> is how one calls"),
        ("Qwen-Qwen2.5-7B-Instruct", '{"temperature": [21, "C"]}'),
        ("Qwen-Qwen2.5-7B-Instruct", "[1, 2, 3]"),
        ("Qwen3-Coder", "<function=unknown>\n</function>"),
        ("GLM-4.6", "<tool_call>unknown <arg_key>"),
        ("meta-llama-Llama-3.1-8B-Instruct", '{"name": "Ada", "age": 36}'),
        ("mistralai-Mistral-Nemo-Instruct-2407", "[TOOL_CALLS] oh"),
        ("deepseek-ai-DeepSeek-V3.1", "Write ```json\n{}\n``` so"),
        ("unsloth-Apriel-1.5", "a <tool"),
        # Calls that cannot be read, cut off or not:
        ("Qwen-Qwen2.5-7B-Instruct", '<tool_call>\n{"name": "edit", "argu'),
        ("google-gemma-4-31B-it", '<|tool_call>call:edit{filename:<|"|>a'),
        ("google-gemma-4-31B-it", '<|tool_call>call:edit{filename:<|"|>a<|"|>b}<tool_call|>'),
        ("LFM2-8B-A1B", "<|tool_call_start|>[edit(filename="),
        ("LFM2-8B-A1B", "<|tool_call_start|>[edit(filename='it's')]<|tool_call_end|>"),
        ("LFM2-8B-A1B", "<|tool_call_start|>[edit(old='a' 'b')]<|tool_call_end|>"),
        ("LFM2-8B-A1B", "<|tool_call_start|>[edit(**{'filename': 'a'})]<|tool_call_end|>"),
        ("meta-llama-Llama-3.1-8B-Instruct", "One; two; three;"),
    ],
)
def test_anything_but_a_call_is_text(name: str, output: str) -> None:
    assert parse(output, template(name), USE) == Message(content=output)


CALL = '<tool_call>\n{"name": "edit", "arguments": {"filename": "a"}}\n</tool_call>'
SPACES = [
    "<tool_call>\n</tool_call>",
    "<tool_call> \n",
    "<tool_call><tool_call>",
    "  Hello",
    " \n",
    "\n \n",
    "a \n b",
    "a\n</tool_call>",
    "a ",
    " <tool",
    "\n\n[1]",
]


@pytest.mark.parametrize(
    ("output", "content", "n_calls"),
    [
        *((output, output, 0) for output in SPACES),
        (f"{CALL}\n", "", 1),
        (f"\n{CALL}", "", 1),
        (f"{CALL} \n {CALL}", "", 2),
        (f"{CALL}\nthen", "\nthen", 1),
        (f"Hi {CALL}", "Hi ", 1),
        (f"Hi\n\n{CALL}\nand\n{CALL}\n", "Hi\n\nand", 2),
        (f"Hi\n{CALL} {{}}", "Hi {}", 1),
        (f"{CALL}<tool_call>", "<tool_call>", 1),
        (f"{CALL}</tool_call>", "", 1),
        (f"{CALL} x {CALL}", " x ", 2),
    ],
)
def test_white_space_is_text_except_beside_calls(output: str, content: str, n_calls: int) -> None:
    message = parse(output, template("Qwen-Qwen2.5-7B-Instruct"), USE)
    assert message.content == content and len(message.calls) == n_calls


@pytest.mark.parametrize(
    ("output", "reasoning", "content"),
    [
        ("\n<think>a</think>b", "a", "b"),
        (" <think>\na\n</think>\n\nb", "a", "b"),
        ("</think>b", "", "b"),
        (" \n</think>\n b", "", " b"),
        ("<think>a</think> ", "a", " "),
        ("<think>a</think>\n<think>b</think>c", "ab", "c"),
        (f"<think>a</think>\n{CALL}", "a", ""),
        *((output, "", output) for output in ("a</think>b", "a<think>b</think>c", "a\n<think>")),
    ],
)
def test_reasoning_is_only_at_the_beginning(output: str, reasoning: str, content: str) -> None:
    message = parse(output, template("Qwen-Qwen3-0.6B"), USE)
    assert (message.reasoning, message.content) == (reasoning, content)


def test_without_parallel_calls_only_the_first_is_read() -> None:
    use = use_of(TOOLS, parallel=False)
    call = '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>'
    assert parse(call * 3, template("Qwen-Qwen2.5-7B-Instruct"), use).named == [("nothing", {})]


def one_parameter(schema: object) -> ToolUse:
    parameters = {"type": "object", "properties": {} if schema is None else {"v": schema}}
    return use_of([{"type": "function", "function": {"name": "f", "parameters": parameters}}])


TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        # A value is what it reads as…
        (None, "5", 5),
        (None, "abc", "abc"),
        (None, "True", True),
        (None, "None", None),
        (None, "{'a': (1,)}", {"a": [1]}),
        (None, '"\\u00e9"', "é"),
        (True, "5", 5),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "abc", "abc"),
        ({"type": ["boolean", "integer"]}, "[1]", [1]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        # …but where that is not allowed and a text is.
        ({"type": "string"}, "5", "5"),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["integer", "string"]}, "1.5", "1.5"),
        ({"type": ["integer", "string"]}, "[1]", "[1]"),
        ({"type": ["number", "string"]}, "5", 5),
        ({"type": ["number", "string"]}, "1.5", 1.5),
        ({"type": ["boolean", "string"]}, "5", "5"),
        ({"type": ["boolean", "string"]}, "True", True),
        (TEXT_OR_NULL, "7", "7"),
        (TEXT_OR_NULL, "null", None),
        ({"anyOf": [{"type": "string"}, {}]}, "7", 7),
        ({"oneOf": [{"type": "string"}]}, "7", "7"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, "a"]}, "1", 1),
        ({"enum": [1, "a"]}, "a", "a"),
        ({"enum": []}, "1", 1),
        ({"enum": ["1"], "type": "integer"}, "1", 1),
        # Invalid schemas.
        ({"anyOf": {}}, "7", 7),
        ({"type": 5}, "1", 1),
        ({"type": [5, "string"]}, "1", "1"),
    ],
)
def test_a_tagged_value_is_what_its_schema_allows(schema: object, text: str, value: object) -> None:
    call = f"<function=f>\n<parameter=v>\n{text}\n</parameter>\n</function>"
    output = f"<tool_call>\n{call}\n</tool_call>"
    (found,) = parse(output, template("Qwen3-Coder"), one_parameter(schema)).named
    assert found == ("f", {"v": value}) and type(found[1]["v"]) is type(value)
    (cut,) = parse(
        output.partition("\n</p")[0], template("Qwen3-Coder"), one_parameter(schema)
    ).calls
    ends = {cut["arguments"] + "}", cut["arguments"] + '"}'}
    assert '{"v": ' + json.dumps(value, ensure_ascii=False) + "}" in ends, "it is not lost"


def test_lists_in_tags_without_an_end_are_not_lost() -> None:
    call = ']<]minimax[>[<invoke name="f">]<]minimax[>[<v>]<]minimax[>[<item>1]<]minimax[>[</item>'
    (found,) = parse(
        "]<]minimax[>[<tool_call>" + call, template("MiniMax-M3"), one_parameter(None)
    ).calls
    assert found["arguments"] == '{"v": [1]'


ITEMS = "§<item>1§</item>§<item>2§</item>"


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("§<a>1§</a>§<b>x§</b>", None, {"a": 1, "b": "x"}),
        (ITEMS, None, [1, 2]),
        (ITEMS, {"type": "object"}, {"item": 2}),
        (ITEMS, {"type": "array", "items": {"type": "string"}}, ["1", "2"]),
        ("§<item>1§</item>§<a>2§</a>", None, {"item": 1, "a": 2}),
        ("§<a>1§</a>", {"properties": {"a": {"type": "string"}}}, {"a": "1"}),
        ("§<a>1§</a>", {"properties": {"b": {}}}, {"a": 1}),
        (
            f"§<a>{ITEMS}§</a>",
            {"properties": {"a": {"items": {"type": "string"}}}},
            {"a": ["1", "2"]},
        ),
        ("t§<a>1§</a>t", None, {"a": 1}),
        ("", {"type": "array"}, []),
        (" ", {"type": "object"}, {}),
        ("x", {"type": "array"}, "x"),
        ("", None, ""),
        ("5", {"type": "string"}, "5"),
        ("5", None, 5),
        # Anything that is not a tag is text.
        ("§<a><b>§</a>", None, {"a": "<b>"}),
        ("§<a>1§</b>2§</a>", None, {"a": "1§</b>2"}),
        ("§</a>5", None, "§</a>5"),
        ("§<a>1", None, "§<a>1"),
    ],
)
def test_tags_within_tags_are_lists_and_objects(text: str, schema: object, value: object) -> None:
    assert nested_value(text, "§", schema) == value


def test_arguments_stream_as_they_come() -> None:
    """A long text argument is not held back until it is complete."""
    parser = AnswerParser(conventions_of(template("Qwen3-Coder")), USE)
    parser.feed("<function=python>\n<parameter=code>\n")
    sent = [parser.feed("word " * 8) for _ in range(5)]
    assert all(any(isinstance(d, Arguments) for d in deltas) for deltas in sent[1:])


@pytest.mark.parametrize(
    ("name", "has_schema", "output"),
    [
        *(
            ("Qwen-Qwen2.5-7B-Instruct", False, output)
            for output in ('{"city": "Par', '{"name": "Ada", "a', "[1, 2", '{"a": {"b')
        ),
        *(
            ("Qwen3-Coder", True, output)
            for output in ('{"name": "Ada', '{"name": "pythagoras of', '["python', '"a')
        ),
    ],
)
def test_an_answer_that_is_json_is_not_held_back(name: str, has_schema: bool, output: str) -> None:
    use = dataclasses.replace(USE, is_json=has_schema)
    parser = AnswerParser(conventions_of(template(name)), use)
    deltas = [delta for sign in output for delta in parser.feed(sign)]
    assert message_of(deltas).content == output


@pytest.mark.parametrize(
    "output",
    [
        '{"code": "<tool_call>python(code=1)"}',
        '{"code": "<function=python><parameter=code>1</parameter></function>"}',
        '"[TOOL_CALLS][python(code=1)]"',
        '{"name": "python"}',
        '{"type": "function", "function": "python"}',
        '{"name": "python", "parameters": {"code": "1"}}',
        '{"name": "python", "arguments": "{}"}',
        '{"name": "python", "arguments": null}',
        '{"arguments": {"code": "1"}, "name": "python"}',
        '[{"name": "python", "arguments": {"code": "1"}}]',
    ],
)
def test_under_a_schema_only_the_grammars_own_form_is_a_call(output: str) -> None:
    named = 'a "name" (of any kind)'
    use = dataclasses.replace(USE, tools={**USE.tools, named: Tool(named, "t")}, is_json=True)
    for name in ("Qwen-Qwen2.5-7B-Instruct", "Qwen3-Coder"):
        assert parse(output, template(name), use) == Message(output)
        for function in ("python", named):
            written = json.dumps({"name": function, "arguments": {"code": "1"}}, indent=1)
            called = parse(written, template(name), use)
            assert called.named == [(function, {"code": "1"})] and not called.content


@pytest.mark.parametrize(
    ("name", "output", "arguments"),
    [
        (
            "Qwen-Qwen2.5-7B-Instruct",
            '<tool_call>{"name": "amount", "arguments": {"orig": NaN, "b": [-Infinity, 1e999]}}',
            '{"orig": "NaN", "b": ["-Infinity", "1e999"]}',
        ),
        (
            "Qwen-Qwen2.5-7B-Instruct",
            '<tool_call>{"name": "amount", "arguments": {"orig": 1٢, "b": [٣]}}</tool_call>',
            '{"orig": "1٢", "b": ["٣"]}',
        ),
        (
            "Qwen-Qwen2.5-7B-Instruct",
            r'<tool_call>{"name": "edit", "arguments": {"old": "\ud83d", "new": "\ud83d\ude00"}}',
            r'{"old": "�", "new": "\ud83d\ude00"}',
        ),
        (
            "Qwen-Qwen2.5-7B-Instruct",
            r'<tool_call>{"name": "edit", "arguments": {"old": "\x4 \u12", "new": [True, None]}}',
            r'{"old": "\\x4 \\u12", "new": [true, null]}',
        ),
        (
            "Qwen-Qwen2.5-7B-Instruct",
            r'<tool_call>{"name": "edit", "arguments": "{\"old\": \"a\"}"}</tool_call>',
            '{"old": "a"}',
        ),
        (
            "Qwen-Qwen2.5-7B-Instruct",
            r'<tool_call>{"arguments": "{\"old\": \"a\"}", "name": "edit"}</tool_call>',
            '{"old": "a"}',
        ),
        (
            "Qwen-Qwen2.5-7B-Instruct",
            '<tool_call>{"name": "edit", "arguments": null}</tool_call>',
            "{}",
        ),
        (
            "Qwen3-Coder",
            "<function=amount>\n<parameter=orig>\nNaN\n</parameter>\n</function>",
            '{"orig": "NaN"}',
        ),
        (
            "GLM-4.6",
            r'<tool_call>todo<arg_key>todos</arg_key><arg_value>["\ud83d"]</arg_value></tool_call>',
            '{"todos": ["�"]}',
        ),
    ],
)
def test_arguments_are_strict_json(name: str, output: str, arguments: str) -> None:
    (call,) = parse(output, template(name), USE).calls
    assert call["arguments"] == arguments
    json.loads(arguments, parse_constant=pytest.fail)


@pytest.mark.parametrize("splits", [True, False])
def test_without_tools_an_answer_is_its_text(splits: bool) -> None:
    for case in CASES:
        message = parse(HELLO, template(case.template), None, splits_reasoning=splits)
        assert message == Message(content=HELLO)


def test_a_frame_that_the_prompt_begins_is_not_text() -> None:
    """Also without tools."""
    source = template("meetkai-functionary-medium-v3.2")
    for use in (None, USE):
        assert parse(f"all\n{HELLO}", source, use, ">>>") == Message(content=HELLO)


@pytest.mark.parametrize(
    ("name", "prompt_end", "output"),
    [
        ("ByteDance-Seed-OSS", "<seed:think>\n", "Hm</seed:think>\n\nHi"),
        ("Qwen-Qwen3-0.6B", "<think>\n\n\n", "Hm\n</think>\n\n\nHi"),
        (R7B, "<|START_RESPONSE|>\n", "\nHi<|END_RESPONSE|>"),
    ],
)
def test_white_space_of_the_prompt_is_no_part_of_the_answer(
    name: str, prompt_end: str, output: str
) -> None:
    found = parse(output, template(name), None, prompt_end)
    assert (found.reasoning, found.content) == ("Hm" * ("Hm" in output), "\nHi")


def test_unsplit_reasoning_stays_in_the_text() -> None:
    output = f"<think>hm</think>{HELLO}"
    assert parse(output, None, None, splits_reasoning=False).content == output
    assert parse(output, None, None) == Message(HELLO, "hm")


def test_mistral_templates_get_ids_of_nine_characters() -> None:
    output = "[TOOL_CALLS]nothing[ARGS]{}"
    (call,) = parse(output, template("unsloth-mistral-Devstral-Small-2507"), USE).calls
    assert len(call["id"]) == 9 and call["id"].isalnum()


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("google-gemma-4-31B-it", {"<|channel>", "<channel|>", "<|tool_call>", '<|"|>'}),
        (
            "mistralai-Ministral-3-14B-Reasoning-2512",
            {"[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"},
        ),
        ("openai-gpt-oss-120b", {"<|channel|>", "<|message|>", "<|start|>", "<|end|>"}),
        ("deepseek-ai-DeepSeek-V3.1", {"</think>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"}),
        ("Kimi-K2-Thinking", {"<|tool_call_begin|>", "<|tool_call_argument_begin|>"}),
        ("GigaChat3-10B-A1.8B", {"<|message_sep|>", "<|role_sep|>"}),
        ("MiniMax-M3", {"]<]minimax[>[<tool_call>", "</mm:think>"}),
    ],
)
def test_marks_that_are_control_tokens_are_shown(name: str, tokens: set[str]) -> None:
    own = conventions_of(template(name))
    assert tokens <= set(own.shown_tokens[True, True])
    assert not own.shown_tokens[False, False] or name.startswith("openai")


@pytest.mark.parametrize("quote", ["'", '"'])
def test_an_open_quote_costs_no_time(quote: str) -> None:
    output = "<|tool_call_start|>[f(a=" + quote + ("\\" + quote) * 100_000 + ")]<|tool_call_end|>"
    began = time.process_time()
    message = parse(output, "List of tools: tools <|tool_call_start|>", USE, lengths=[5000])
    assert not message.calls and message.content == output
    assert clock.within(time.process_time() - began, 5)


def test_the_forced_form_is_read_whatever_the_dialect() -> None:
    use = use_of(TOOLS, forced=True)
    arguments: Any = {"filename": "a", "old": "<tool_call>", "new": "}"}
    output = json.dumps({"name": "edit", "arguments": arguments})
    for name in KINDS:
        assert parse(output, template(name), use).named == [("edit", arguments)]


def test_a_forced_call_that_is_cut_off_is_not_text() -> None:
    output = json.dumps({"name": "edit", "arguments": {"filename": "a"}})
    begun = output.index(": {") + len(": {")
    for name in KINDS:
        for end in range(len(output)):
            cut = parse(output[:end], template(name), use_of(TOOLS, forced=True), lengths=[3])
            assert cut.content == "" and len(cut.calls) == (end >= begun)


def test_a_parser_is_reasoning_until_the_end_mark() -> None:
    parser = AnswerParser(conventions_of(None), None)
    states = []
    for piece in ("<think>", "\nIt", " is </", "think", ">", "\n\n", "Yes"):
        parser.feed(piece)
        states.append(parser.is_reasoning)
    assert states == [True] * 4 + [False] * 3


# --- many log-probabilities ------------------------------------------------------------------


def scored_pieces(pieces: list[bytes], n_top: int = 0) -> tuple[TokenLogprob, ...]:
    top = tuple(TokenLogprob(id, b"%d" % id, -2.0) for id in range(n_top))
    return tuple(
        TokenLogprob(at, piece, -1.0 if at else math.nan, top if at else ())
        for at, piece in enumerate(pieces)
    )


BYTES = st.one_of(
    st.binary(max_size=3), st.sampled_from(["é".encode(), "😀".encode()[:3], b"\x80"])
)


@given(pieces=st.lists(BYTES, max_size=12), offset=st.integers(-2, 3))
def test_an_offset_counts_the_characters_before_it(pieces: list[bytes], offset: int) -> None:
    text = b"".join(pieces).decode("utf-8", "replace")
    characters = getincrementaldecoder("utf-8")("replace")
    lengths = [len(characters.decode(piece)) for piece in pieces]
    shown = "x" * offset + text[max(-offset, 0) :]
    offset = len(shown) - len(text)
    expected = [max(offset + sum(lengths[:at]), 0) for at in range(len(pieces))]
    assert prompt_offsets(shown, scored_pieces(pieces)) == expected


def test_offsets_take_linear_time() -> None:
    """Four times as many take about four times as long, not sixteen."""
    took = []
    for n_tokens in (10_000, 40_000):
        entries = scored_pieces(["日本語の文章".encode()] * n_tokens)
        text = "日本語の文章" * n_tokens
        began = time.thread_time()
        completion_logprobs(entries, prompt_offsets(text, entries))
        took.append(time.thread_time() - began)
    assert took[1] < 10 * took[0]


def test_a_stream_encodes_many_log_probabilities_on_a_thread(
    scripted: ScriptedFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def recorded(entries: Any, offsets: Any) -> Any:
        threads.append(threading.current_thread().name)
        return completion_logprobs(entries, offsets)

    monkeypatch.setattr("worker.api.dialects.openai.stream.completion_logprobs", recorded)
    worker = scripted()
    body = {"prompt": "Once", "echo": True, "logprobs": 20, "stream": True}
    for n_tokens in (8, 2000):
        scored = PromptScored(0, scored_pieces([b"a"] * n_tokens, 20))
        worker.supervisor.script = [[Started(0, 0), scored], [Finished(0, "EOS", 0, 1.0)]]
        answer = httpx.post(f"{worker.base_url}/v1/completions", json=body)
        first = json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))["choices"][0]
        assert len(first["logprobs"]["tokens"]) == n_tokens and first["text"] == "Once"
    few, many = threads
    assert many.startswith("off-loop") and not few.startswith("off-loop")


# --- clients that have left -------------------------------------------------------------------


@pytest.mark.parametrize("streams", [True, False])
def test_no_job_begins_once_its_client_has_left(scripted: ScriptedFactory, streams: bool) -> None:
    """It leaves when the second of its eight jobs is accepted."""
    worker = scripted()
    worker.supervisor.script = story("a")
    client = socket.create_connection(("127.0.0.1", worker.port))

    class Acceptances:
        n_turns = 0

        async def turn(self) -> None:
            self.n_turns += 1
            if self.n_turns == 2:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()  # with a reset: who only closes a side waits for the answer
                await asyncio.sleep(0.2)

    acceptances: Any = Acceptances()
    worker.state.acceptances = acceptances
    body = json.dumps({"prompt": "Once", "n": 8, "stream": streams}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    client.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    until(lambda: acceptances.n_turns >= 2, lambda: "no second job was accepted")
    time.sleep(0.5)
    assert len(worker.supervisor.requests) == 2


def test_prompt_progress_drops_no_log_probabilities() -> None:
    """A preempted request computes the prompt again, in the middle of the answer."""
    first, second = TokenLogprob(1, b"a", -1.0), TokenLogprob(2, b"b", -2.0)
    choice = Choice(0, cast("Job", None))
    for delta in (Text("", (first,)), PromptProgress(1, 5, 0.1), Text("ab", (second,))):
        choice.add(delta)
    assert choice.blocks[0].scores == [first, second]


def test_log_probabilities_of_reasoning_are_not_in_the_text() -> None:
    """Although the text begins like the end of the reasoning."""
    thought, of_text = TokenLogprob(1, b"a", -1.0), TokenLogprob(1, b"a", -2.0)
    choice = Choice(0, cast("Job", None))
    for delta in (Text("", (thought,)), Reasoning("a"), Text("", (of_text,)), Text("aa", ())):
        choice.add(delta)
    assert choice.blocks[-1].scores == [of_text]


def test_log_probabilities_of_withheld_text_wait_for_it() -> None:
    """The line break before what may be a mark is certain earlier."""
    scores = [TokenLogprob(1, bytes([code]), -1.0) for code in b"a\n<thead>"]
    choice = Choice(0, cast("Job", None), partial(AnswerParser, conventions_of(None), USE))
    choice.read(Started(0, 0))
    for score in scores:
        for delta in choice.read(Token(0, score.piece.decode(), (1,), (score,))):
            choice.add(delta)
    assert choice.text == "a\n<thead>" and choice.blocks[0].scores == scores


@contextmanager
def no_job_is_kept(worker: ScriptedWorker) -> Iterator[None]:
    """Check that no job stays alive: a reference cycle would wait for a rare garbage collection."""

    def alive() -> int:
        return sum(isinstance(each, Job | Inbox) for each in gc.get_objects())

    gc.collect()
    before = alive()
    gc.disable()
    try:
        yield
        worker.supervisor.script = ()
        worker.supervisor.jobs.clear()
        until(lambda: alive() == before, lambda: f"{alive() - before} are kept")
    finally:
        gc.enable()


def test_a_refused_request_leaves_no_reference_cycle(scripted: ScriptedFactory) -> None:
    worker = scripted()
    with no_job_is_kept(worker), httpx.Client(base_url=worker.base_url) as client:
        for stream in (False, True):
            worker.supervisor.script = [QueueFull("too much waits")]
            body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
            assert "too much waits" in client.post("/v1/chat/completions", json=body).text
            worker.supervisor.jobs.clear()


def test_no_keepalive_timer_outlives_its_stream(scripted: ScriptedFactory) -> None:
    worker = scripted(keepalive=3600)
    worker.supervisor.script = [0.1, *story("a")]
    with no_job_is_kept(worker), httpx.Client(base_url=worker.base_url) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_a_stream_whose_client_left_leaves_no_reference_cycle(
    scripted: ScriptedFactory,
) -> None:
    worker = scripted()
    with no_job_is_kept(worker), httpx.Client(base_url=worker.base_url) as client:
        worker.supervisor.script = [[Started(0, 0), Token(0, "a", (1,))], 0.5]
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            next(response.iter_raw())
        until(lambda: bool(worker.supervisor.cancelled), lambda: "the job goes on")


@given(
    stops=st.lists(st.text("think</>\nOé", min_size=1, max_size=12).map(lambda text: text + "!")),
    end=st.sampled_from(["</think>", "\n</think>\n\n"]),
)
def test_tokens_of_reasoning_are_counted_whatever_a_stop_holds_back(
    stops: list[str], end: str
) -> None:
    own = conventions_of(template("Qwen-Qwen3-0.6B"))
    n_reasoning = []
    for stop in ((), (*stops, "think>\n\nOno", "nk>\nO!", "hink>O!")):
        sequence = make_sequence(0, b"", stop=tuple(stop), max_tokens=100)
        sequence.n_most, sequence.started_at, sequence.first_token_at = 100, 0.0, 0.0
        answers, events = Answers(ByteRunner(1, 100, 100, 10)), list[Any]()
        for token in f"<think>\nThé{end}One think>\n.".encode():
            assert answers.take(sequence, 0, token, events) is None
        answers.finish(sequence, "EOS", None, 1.0, events)
        choice = Choice(0, cast("Job", None), partial(AnswerParser, own, None))
        for event in (Started(0, 0), *events):
            for delta in choice.read(event):
                choice.add(delta)
        assert (choice.reasoning, choice.text) == ("Thé", "One think>\n.")
        n_reasoning.append(choice.reasoning_tokens)
    assert n_reasoning[0] == n_reasoning[1]


@pytest.mark.parametrize(
    "name", ["Qwen-Qwen3-0.6B", "Mistral-Small-3.2-24B-Instruct-2506", "Kimi-K3"]
)
def test_a_limit_within_the_end_mark_leaves_no_piece_of_it(name: str) -> None:
    """Such as a limit within the text that closes reasoning whose budget is spent."""
    own = conventions_of(template(name))
    closing = own.reasoning.closing
    for n_chars in range(len(closing) + 1):
        for is_cut in (True, False):
            parser = AnswerParser(own, None)
            deltas = parser.feed(own.thinking.begin + "Hm" + closing[:n_chars])
            found = message_of([*deltas, *parser.finish(is_cut=is_cut)])
            left = closing[: n_chars % len(closing)]
            assert found.reasoning == "Hm" + (left.rstrip(own.thinking.end) if is_cut else left)
            assert not found.content


def called(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("schema", "resembles"),
    [
        ({"properties": {"name": {}, "arguments": {}, "sure": {}}}, True),
        ({"properties": {"name": {}}, "additionalProperties": True}, True),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, True),
        ({"type": ["object", "null"]}, True),
        (True, True),
        ({"properties": {"name": {}, "arguments": {}}}, False),
        ({"properties": {"name": {}, "sure": {}}}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"name": {}}}}}, False),
        ({"type": "array"}, False),
    ],
)
def test_an_answer_that_goes_on_after_what_resembles_a_call_is_text(
    schema: Any, resembles: bool
) -> None:
    """Its later members were dropped."""
    use = ToolUse(False, True, {"look": Tool("look", "t")}, is_json=True)
    assert (
        constrain(JsonSchema(schema, "s", calls=(Tool("look", "t"),))).resembles_calls is resembles
    )
    call = '{"name": "look", "arguments": {"at": [1, {"b": "c"}]}'
    for rest, is_call in (("}", True), ("", True), (' , \n"sure": true}', not resembles)):
        parser = AnswerParser(conventions_of(None), use, has_form=True, resembles_calls=resembles)
        found = message_of(deltas_of(parser, call + rest))
        assert found.named == [("look", {"at": [1, {"b": "c"}]})] * is_call
        assert found.content == (call + rest) * (not is_call)
        assert parser.is_in_call is (resembles and rest == "")


@pytest.mark.parametrize(
    ("name", "output", "text"),
    [
        (
            "openai-gpt-oss-120b",
            "<|channel|>commentary to=functions.look json<|message|>*** A\n{b}\n<|call|>",
            "*** A\n{b}\n",
        ),
        *(
            (
                "openai-gpt-oss-120b",
                f"<|channel|>commentary to=functions.look<|message|>{text}<|call|>",
                text,
            )
            for text in ("{a: b} // c", '{"n": 1}', '"a" + "b"', "{", '{"inputs"')
        ),
        (
            "openai-gpt-oss-120b",
            '<|channel|>commentary to=functions.look<|message|>{\n  "input": "{\\n"}<|call|>',
            "{\n",
        ),
        ("Mistral-Small-3.2-24B-Instruct-2506", "[TOOL_CALLS]look[ARGS]+ a, [b]\n", "+ a, [b]\n"),
        ("Qwen-Qwen3-0.6B", called('"*** A\\n"'), "*** A\n"),
        (
            "Qwen-Qwen3-0.6B",
            called('{"text": "\\u00e9", "n": [1]}'),
            '{"text": "\\u00e9", "n": [1]}',
        ),
        ("Qwen-Qwen3-0.6B", called('{"n": 1, "input": ["a", {"b": "c"}]}'), '["a", {"b": "c"}]'),
        ("Qwen-Qwen3-0.6B", called('{"n": 1, "input": "\\"\\ud83e\\udd8a\\t", "m": ""}'), '"🦊\t'),
    ],
)
def test_a_custom_tool_gets_its_text_from_arguments_of_any_form(
    name: str, output: str, text: str
) -> None:
    """Even if the model writes no argument of that name, or no JSON."""
    parameters = {"properties": {"input": {"type": "string"}}}
    use = ToolUse(False, True, {"look": Tool("look", "t", None, parameters, is_custom=True)})
    message = parse(output, template(name), use)
    assert [call["input"] for call in message.calls] == [text] and not message.content


@given(data=st.data())
def test_an_answer_under_a_schema_is_forwarded_whatever_its_strings_contain(
    data: st.DataObject,
) -> None:
    """A JSON string may contain `[THINK]`, which Mistral's models may write anywhere."""
    own = conventions_of(template(data.draw(st.sampled_from(KINDS))))
    marks = [
        own.thinking.begin,
        own.thinking.end,
        *own.calls.frames,
        f"<{own.wrap}>",
        "words",
        "\n",
        " ",
    ]
    texts = st.lists(st.sampled_from(marks), max_size=6).map("".join)
    output = json.dumps(data.draw(st.dictionaries(texts, texts, max_size=3)), ensure_ascii=False)
    for use in (None, ToolUse(False, True, {"look": Tool("look", "t")}, is_json=True)):
        parser = AnswerParser(own, use, has_form=True)
        found = message_of(deltas_of(parser, output, data.draw(st.lists(st.integers(1, 9)))))
        assert (found.content, found.reasoning, found.named) == (output, "", [])
