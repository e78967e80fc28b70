"""Answers split into reasoning, text and calls: as models write them, cut off, and as noise."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.api.answers import Message, message_of, parse
from tests.unit.api.model_outputs import CASES, HELLO, TOOLS, Case
from tests.unit.api.round_trips import NAMES
from tests.unit.api.round_trips import source as template
from worker.api.chat.parse.answer import AnswerParser
from worker.api.chat.parse.calls import ToolUse
from worker.api.chat.parse.conventions import CONVENTIONS, THINKING, conventions_of

USE = ToolUse.of(TOOLS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.template}:{case.output[:30]!r}")
def test_an_output_says_what_it_says(case: Case) -> None:
    source = template(case.template)
    for size in (1, 2, 5, 13, 1000):
        message = parse(case.output, source, USE, size, case.prompt_end)
        assert message.named == case.calls
        assert message.content == case.content and message.reasoning == case.reasoning
        ids = [call["id"] for call in message.calls]
        assert len(set(ids)) == len(ids)


HERMES_CALL = '<tool_call>\n{"name": "edit", "arguments": {"filename": "a.py", "old": "x'
CODER_CALL = "<function=edit>\n<parameter=filename>\na.py\n</parameter>\n<parameter=old>\nx y"


@pytest.mark.parametrize(
    ("name", "output", "arguments"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", HERMES_CALL, '{"filename": "a.py", "old": "x'),
        ("Qwen3-Coder", CODER_CALL, '{"filename": "a.py", "old": "x y'),
        ("unsloth-mistral-Devstral-Small-2507", '[TOOL_CALLS]edit[ARGS]{"fil', '{"fil'),
        (
            "openai-gpt-oss-120b",
            '<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{"fi',
            '{"fi',
        ),
    ],
)
def test_a_call_that_is_cut_off_stays_a_call(name: str, output: str, arguments: str) -> None:
    for size in (1, 7, 1000):
        (call,) = parse(output, template(name), USE, size).calls
        assert call["name"] == "edit" and call["arguments"] == arguments


@pytest.mark.parametrize(
    ("name", "output"),
    [
        (
            "Qwen-Qwen2.5-7B-Instruct",
            '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        ),
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
        ("meta-llama-Llama-3.1-8B-Instruct", "One; two; three;"),
    ],
)
def test_what_is_no_call_is_text(name: str, output: str) -> None:
    for size in (1, 7, 1000):
        message = parse(output, template(name), USE, size)
        assert message == Message(content=output)


def test_one_call_at_most_where_one_is_asked_for() -> None:
    use = ToolUse.of(TOOLS, parallel=False)
    call = '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>'
    assert parse(call * 3, template("Qwen-Qwen2.5-7B-Instruct"), use, 5).named == [("nothing", {})]


def test_arguments_stream_as_they_come() -> None:
    """A long text argument is not held back until it is whole."""
    from worker.api.chat.delta import Arguments

    for name, head in (("Qwen3-Coder", "<function=python>\n<parameter=code>\n"),):
        parser = AnswerParser(conventions_of(template(name)), USE)
        parser.feed(head)
        sent = [parser.feed("word " * 8) for _ in range(5)]
        assert all(any(isinstance(d, Arguments) for d in deltas) for deltas in sent[1:])


@pytest.mark.parametrize("output", ['{"city": "Par', '{"name": "Ada", "a', "[1, 2", '{"a": {"b'])
def test_an_answer_that_is_json_is_not_held_back(output: str) -> None:
    parser = AnswerParser(conventions_of(template("Qwen-Qwen2.5-7B-Instruct")), USE)
    deltas = [delta for sign in output for delta in parser.feed(sign)]
    assert message_of(deltas).content == output


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
            r'<tool_call>{"name": "edit", "arguments": {"old": "\ud83d", "new": "\ud83d\ude00"}}',
            r'{"old": "�", "new": "\ud83d\ude00"}',
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
    for size in (1, 3, 1000):
        (call,) = parse(output, template(name), USE, size).calls
        assert call["arguments"] == arguments
        json.loads(arguments, parse_constant=pytest.fail)


@pytest.mark.parametrize("splits", [True, False])
def test_without_tools_an_answer_is_its_text(splits: bool) -> None:
    for case in CASES:
        message = parse(HELLO, template(case.template), None, 3, splits_reasoning=splits)
        assert message == Message(content=HELLO)


def test_reasoning_stays_in_the_text_where_it_is_not_split() -> None:
    output = f"<think>hm</think>{HELLO}"
    assert parse(output, None, None, 2, splits_reasoning=False).content == output
    assert parse(output, None, None, 2) == Message(HELLO, "hm")


def test_mistral_templates_get_the_ids_that_they_take() -> None:
    output = "[TOOL_CALLS]nothing[ARGS]{}"
    (call,) = parse(output, template("unsloth-mistral-Devstral-Small-2507"), USE, 4).calls
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
def test_marks_that_are_control_tokens_are_asked_for(name: str, tokens: set[str]) -> None:
    conventions = conventions_of(template(name))
    assert tokens <= set(conventions.tokens(calls=True, reasoning=True))
    assert not conventions.tokens(calls=False, reasoning=False) or name.startswith("openai")


SPELLINGS = sorted(
    {mark for convention in CONVENTIONS for mark in convention.texts if mark}
    | {mark for thinking in THINKING for mark in (thinking.begin, thinking.end)}
)
PIECES = st.one_of(
    st.sampled_from(SPELLINGS),
    st.sampled_from(
        [
            '{"name": "edit", ',
            '"arguments": {',
            '"filename": "a"',
            "}",
            "]",
            "[",
            ", ",
            "edit",
            ":0",
        ]
        + ["call:edit{", "edit(", "<parameter=old>", "</parameter>", "</function>", '">', "\n", " "]
        + ["{}", '"', "\\", "null", "\ud800", "é", "to=functions.edit", "</", "]]>", "<![CDATA["]
    ),
    st.text(max_size=6),
)


@settings(max_examples=250, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    pieces=st.lists(PIECES, max_size=12),
    prompt_end=st.sampled_from(["", "<think>\n", "<|START_THINKING|>", ">>>"]),
    size=st.integers(1, 9),
)
def test_no_output_breaks_a_parser(
    name: str, pieces: list[str], prompt_end: str, size: int
) -> None:
    output, source = "".join(pieces), template(name)
    for use in (USE, ToolUse.of(TOOLS, "*"), None):
        parse(output, source, use, size, prompt_end)
        whole = parse(output, source, use, 10**6, prompt_end)
        if use is None and prompt_end == "" and not any(s in output for s in SPELLINGS):
            assert whole.content == output


def test_the_forced_form_is_read_whatever_the_dialect() -> None:
    use = ToolUse.of(TOOLS, "edit")
    arguments: Any = {"filename": "a", "old": "<tool_call>", "new": "}"}
    output = json.dumps({"name": "edit", "arguments": arguments})
    for name in NAMES:
        for size in (1, 1000):
            assert parse(output, template(name), use, size).named == [("edit", arguments)]


def test_a_forced_call_that_is_cut_off_is_no_text() -> None:
    output = json.dumps({"name": "edit", "arguments": {"filename": "a"}})
    begun = output.index(": {") + len(": {")
    for name in NAMES:
        for end in range(len(output)):
            cut = parse(output[:end], template(name), ToolUse.of(TOOLS, "*"), 3)
            assert cut.content == "" and len(cut.calls) == (end >= begun)


def test_reasoning_goes_on_to_its_end_mark() -> None:
    parser = AnswerParser(conventions_of(None), None)
    told = []
    for piece in ("<think>", "\nIt", " is </", "think", ">", "\n\n", "Yes"):
        parser.feed(piece)
        told.append(parser.is_reasoning)
    assert told == [True] * 4 + [False] * 3
