"""A model's output is forwarded unchanged: calls as llama.cpp's templates write them, cut off
anywhere and in pieces of any length, and noise."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.unit.api.answers import deltas_of, message_of, use_of
from tests.unit.api.model_outputs import TOOLS
from tests.unit.api.round_trips import (
    EDIT,
    FUNCTION,
    KINDS,
    NAMES,
    Written,
    conventions,
    source,
    written,
)
from worker.api.chat.delta import Delta, Reasoning, Text
from worker.api.chat.parse.calls import ToolUse
from worker.api.chat.parse.conventions import CONVENTIONS, THINKING
from worker.api.chat.parse.parser import AnswerParser
from worker.api.chat.parse.tagged_calls import Tags

USE = use_of([EDIT, *TOOLS])
WRITE_NO_CALLS = {
    # These drop the calls of earlier answers, or need other variables than `tools`.
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "ibm-granite-granite-3.3-2B-Instruct",
    "CohereForAI-c4ai-command-r-plus-tool_use",
}
READ_AS_TEXT = {"LFM2.5-8B-A1B"}
"""They do not escape quotes: a call with one inside a text cannot be parsed."""

WORDS = [
    "a",
    "b c",
    "'",
    '"',
    "\n",
    "\\",
    "\\n",
    "ü",
    "🦊",
    "<b>",
    "&",
    "1",
    "true",
    "null",
    "None",
]
WORDS += ["{", "}", "[", "]", "(", ")", ", ", ": ", "; ", "#", "=", "```", "</", "<", "]]", " "]
MARKS = sorted({mark for each in CONVENTIONS for mark in each.texts if len(mark) > 4})
TEXTS = st.lists(st.sampled_from(WORDS), max_size=7).map("".join)
VALUES = st.recursive(
    TEXTS | st.integers(-99, 10**12) | st.booleans() | st.floats(0.25, 9, width=16),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.sampled_from("abcdef"), inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "path": TEXTS,
        "text": st.lists(st.sampled_from([*WORDS, *MARKS]), max_size=6).map("".join),
        "lines": st.lists(VALUES, max_size=3),
        "n": st.integers(-9, 9) | st.floats(0.25, 9, width=16),
        "force": st.booleans(),
        "options": st.dictionaries(st.sampled_from("abcdef"), VALUES, max_size=3),
    },
)


def read(
    name: str, output: Written, lengths: Sequence[int], use: ToolUse | None = USE
) -> list[Delta]:
    parser = AnswerParser(conventions(name), use, output.prompt[-64:])
    return deltas_of(parser, output.output, lengths)


def call_of(name: str, calls: list[Any], content: str | None, reasoning: str | None) -> Written:
    """Return the calls as a template writes them, in a form of arguments that it accepts."""
    texts = [json.dumps(each, ensure_ascii=False) for each in calls]
    for given_calls, text in product(
        (calls, texts, calls[:1], texts[:1]), dict.fromkeys((content, "", None))
    ):
        found = written(name, given_calls, text, reasoning)
        if found is not None:
            return found
    pytest.skip("the engine refuses this template's calls")


def has_own_marks(name: str, arguments: Any) -> bool:
    """Whether a text contains the end mark of an argument in this convention, which no template
    escapes."""
    forms = conventions(name).calls.texts
    text = json.dumps(arguments, ensure_ascii=False)
    return any(
        json.dumps(mark, ensure_ascii=False)[1:-1] in text for mark in forms if len(mark) > 4
    )


WITHOUT_TYPES = {"MiniMax-M3"}
"""Within values, these write texts and numbers alike, and nothing for an empty list."""


TURNS = re.compile(
    r"<\|(END_OF_TURN_TOKEN|START_OF_TURN_TOKEN|CHATBOT_TOKEN|end_of_msg|eom_id)\|>"
    r"|<\|tool_response>|<SPECIAL_12>|<｜(end▁of▁sentence|Assistant|hy_eos:opensource)｜>"
)
"""Control tokens after a call, where a turn ends and another begins; none is shown."""


def untyped(value: Any) -> Any:
    """Return a value whose texts are parsed as JSON or Python, without empty lists."""
    match value:
        case str():
            plain = value.strip()
            with contextlib.suppress(ValueError):
                return json.loads("null" if plain == "None" else plain)
        case dict():
            return {key: it for key, each in value.items() if (it := untyped(each)) != []}
        case list() | tuple():
            return [it for each in value if (it := untyped(each)) != []]
    return value


@pytest.mark.parametrize("name", sorted(set(NAMES) - WRITE_NO_CALLS))
@settings(max_examples=8, deadline=None)
@given(
    calls=st.lists(ARGUMENTS, min_size=1, max_size=2),
    content=st.sampled_from([None, "", "Text here", "One; two"]),
    reasoning=st.sampled_from([None, "Hm, so"]),
    cuts=st.lists(st.integers(1, 12), max_size=5),
)
def test_a_call_is_read_as_its_template_writes_it(
    name: str, calls: list[Any], content: str | None, reasoning: str | None, cuts: list[int]
) -> None:
    if name == "NVIDIA-Nemotron-Nano-v2":
        content = None  # it writes text and calls as two answers
    if name == "Apriel-1.6-15b-Thinker-fixed":
        reasoning = None  # it omits the mark with which its prompt ends
    assume(not any(has_own_marks(name, each) for each in calls))
    output = call_of(name, calls, content, reasoning)
    message = message_of(read(name, output, cuts))
    expected = [(FUNCTION, each) for each in calls[: output.output.count(FUNCTION)]]
    if name in READ_AS_TEXT:
        assert message.named in ([], expected)
    elif name in WITHOUT_TYPES:
        assert untyped(message.named) == untyped(expected), output
    else:
        assert message.named == expected, output
    if reasoning and reasoning in output.output:
        assert message.reasoning == reasoning, output
    text = content if content is not None and content in output.output else ""
    if expected and not message.named:  # unparsable output is text, unchanged
        text = output.output.rpartition(conventions(name).thinking.end)[2].strip()
    assert TURNS.sub("", message.content).strip() == text, output


@pytest.mark.parametrize("name", sorted(set(NAMES) - WRITE_NO_CALLS))
def test_a_text_argument_keeps_its_own_line_ends(name: str) -> None:
    arguments = {"path": "\n\na\n b \n\n", "text": "\n"}
    output = call_of(name, [arguments], "", None)
    for cuts in ([1], []):
        assert message_of(read(name, output, cuts)).named == [(FUNCTION, arguments)]


@pytest.mark.parametrize("name", sorted(set(NAMES) - WRITE_NO_CALLS))
@settings(max_examples=8, deadline=None)
@given(
    text=st.lists(st.sampled_from([*WORDS, *MARKS, "*** Begin Patch\n"]), max_size=7).map("".join),
    where=st.floats(0, 1),
    cuts=st.lists(st.integers(1, 12), max_size=5),
)
def test_a_custom_tool_gets_the_text_that_was_written(
    name: str, text: str, where: float, cuts: list[int]
) -> None:
    assume(not has_own_marks(name, text))
    use = use_of([EDIT], custom=FUNCTION)
    output = call_of(name, [{"input": text}], None, None)
    calls = message_of(read(name, output, cuts, use)).calls
    assert [call["input"] for call in calls] == [text] or (name in READ_AS_TEXT and not calls)
    cut = Written(output.prompt, output.output[: int(where * len(output.output))])
    for call in (found := message_of(read(name, cut, [], use)).without_ids).calls:
        # A possible beginning of an end mark is text if nothing follows.
        sent = call["input"]
        assert text.startswith(sent) or (sent.startswith(text) and cut.output.endswith(sent[-1]))
    assert message_of(read(name, cut, cuts, use)).without_ids == found


@pytest.mark.parametrize("name", sorted(set(NAMES) - WRITE_NO_CALLS))
def test_a_text_argument_may_hold_what_begins_an_argument(name: str) -> None:
    """Also after the end of an argument: a repeated one, or an incomplete header."""
    tags = [form.arguments for form in conventions(name).calls.forms]
    flat = [each for each in tags if isinstance(each, Tags) and not each.nested]
    for header, end in (argument for each in flat for argument in each.arguments):
        written = "".join({"{key}": "path", "{type}": "true"}.get(p, p) for p in header.parts)
        for begin in (header.texts[0], written.replace("~", "")):
            arguments = {"path": "a", "text": f"a{end}\n{begin} b"}
            output = call_of(name, [arguments], None, None)
            for cuts in ([1], []):
                assert message_of(read(name, output, cuts)).named == [(FUNCTION, arguments)]


def test_a_list_may_hold_what_begins_an_unescaped_text() -> None:
    name, arguments = "LFM2.5-8B-A1B", {"lines": [["=", "\n'"]]}
    output = call_of(name, [arguments], None, None)
    assert message_of(read(name, output, [])).named == [(FUNCTION, arguments)]


def test_each_convention_of_calls_has_a_template() -> None:
    """Otherwise nothing here would test it."""
    shown = {id(next((c for c in CONVENTIONS if c.is_shown_by(source(n))), None)) for n in NAMES}
    without = [each.opens or each.template for each in CONVENTIONS if id(each) not in shown]
    assert without == [], "none of tests/data/templates is read by it, or another comes before it"


def essence(name: str, text: str, prompt: str = "") -> str:
    """Return a text without whitespace and without marks, the first of which may have begun in the
    prompt."""
    own = conventions(name)
    thinking = own.thinking
    frames = (thinking.begin, thinking.also, thinking.end, *own.calls.frames)
    rests = (mark[n:] for mark in frames for n in range(1, len(mark)) if prompt.endswith(mark[:n]))
    text = text.removeprefix(next((rest for rest in rests if text.startswith(rest)), ""))
    text = "".join(text.split())
    for mark in sorted(("".join(mark.split()) for mark in frames if mark), key=len, reverse=True):
        text = text.replace(mark, "")
    return text


THOUGHTS = [mark for each in THINKING for mark in (each.begin, each.end)]
NOISE = ['{"name": "edit_file", ', '"arguments": {', '"path": "a"', "edit_file", "call:edit_file{"]
NOISE += ["edit_file(", "<parameter=path>", "</parameter>", "</function>", '">', "{}", "\\u", "]]>"]
NOISE += ["<![CDATA[", ":0", "\n", " to=", "\ud800", '"old": ', "to=functions.edit_file"]


@settings(max_examples=500, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    calls=st.lists(ARGUMENTS, max_size=2),
    noise=st.lists(st.sampled_from([*NOISE, *WORDS, *MARKS, *THOUGHTS]), max_size=8).map("".join),
    where=st.floats(0, 1),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    use=st.sampled_from([USE, USE, replace(USE, forced=True, is_json=True), None]),
    begun=st.sampled_from(["", "<think>\n", "<|START_THINKING|>", ">>>"]),
)
def test_no_output_loses_or_gains_a_character(
    name: str,
    calls: list[Any],
    noise: str,
    where: float,
    cuts: list[int],
    use: ToolUse | None,
    begun: str,
) -> None:
    """Text and reasoning together are the output without its marks, unless a call was parsed; and
    an answer in pieces equals the whole one."""
    found = written(name, calls, "Text here", "Hm, so") if calls else None
    plain = found.output[: int(where * len(found.output))] if found else ""
    output = Written(found.prompt if found else begun, plain + noise)
    deltas = read(name, output, [], use)
    message = message_of(deltas)
    assert message.without_ids == message_of(read(name, output, cuts, use)).without_ids
    if not message.calls and (use is None or not use.forced):
        forwarded = "".join(each.text for each in deltas if isinstance(each, Text | Reasoning))
        assert essence(name, forwarded) == essence(name, output.output, output.prompt)


@pytest.mark.parametrize("name", KINDS)
def test_parsing_takes_linear_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts rescanned characters instead of seconds."""
    from worker.api.chat.parse.source import Source

    held = 0
    add = Source.add

    def counted(self: Source, text: str, *, final: bool) -> None:
        nonlocal held
        add(self, text, final=final)
        held += len(self.text)

    monkeypatch.setattr(Source, "add", counted)
    for begin in (
        '{"name": "edit_file", "arguments": {"path": "',
        '{"x": ',
        "[",
        "<tool_call>",
        "",
    ):
        for filling in ("word {<", "\n", "\\", "</", "<tool_call>"):
            held, text = 0, begin + filling * (1_200 // len(filling))
            read(name, Written("", text), [3])
            assert held < 450 * len(text) / 3, (begin, filling)
