"""Raw grammars, regular expressions and choices: what follows them, and what is refused."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.byte_walk import accepts, answer
from worker.api.chat.constrain.constraints import (
    RequestedConstraint,
    choice,
    grammar,
    regular_expression,
)
from worker.errors import InvalidRequest

LIST = """
# a list as llama.cpp's own examples write it
root ::= item+

item ::= "- " [^\\r\\n\\x0b\\x0c]+ "\\n"
"""
SUM = 'root ::= expr "=" ws num "\\n"\nexpr ::= term ([-+*/] term)*\n'
SUM += 'term ::= num | "(" ws expr ")" ws\n'
SUM += "num ::= [0-9]+ ws\nws ::= [ \\t\\n]*\n"


def follows(asked: RequestedConstraint, text: str) -> bool:
    assert asked.constraint is not None, asked.faults
    return accepts(asked.constraint.grammar, text)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= [a-z]+ "end"', "friend", "en"),
        (LIST, "- a\n- b c\n", "- \n"),
        (SUM, "(1+2)*3= 9\n", "1+=2\n"),
        ('root ::= "a" {2,3} | [^"\\]x-z] .', "aaa", "a"),
        ('root ::= "\\u00e9\\x41\\U0001F600" | ("b" |\n "c")?', "éA😀", "d"),
        ('root ::= long-name2*\nlong-name2 ::= "\\"" | "\\\\"', '"\\"', "a"),
        ("start: WORD /[0-9]/\nWORD: /[a-z]+/", "abc1", "abc"),
    ],
)
def test_a_grammar_is_what_it_says(text: str, good: str, bad: str) -> None:
    assert follows(grammar(text, "grammar"), good) and not follows(grammar(text, "grammar"), bad)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("root ::= (", r"line 1: expected \)"),
        ("root ::= missing", "no rule 'missing'"),
        ('other ::= "a"', "no rule 'root'"),
        ("root := 1", "line 1: expected ::="),
        ('root ::= "a', "ends too early"),
        ("root ::= [z-a]", "goes backwards"),
        ('root ::= "\\ud800"', "not a Unicode character"),
        ('root ::= "a"{x}', "expected {n}"),
        ('root ::= "a"{9999999}', "repetitions"),
        ("root ::= <think>", "tokens cannot be named"),
        ("root ::= " + "(" * 9999, "nested too deeply"),
        ("root ::= " + '"a"' * 20_000, "bytes"),
        ("\n".join(f'r{i} ::= r{i + 1} "a"' for i in range(500)), "rules"),
        ("start: %json {}", "%json"),
        ("start: a\n" + "\n" * 999, "lines"),
        ("", "no rule 'root'"),
    ],
)
def test_a_grammar_that_is_none_is_refused_by_name(text: str, reason: str) -> None:
    (fault,) = grammar(text, "grammar").faults
    assert fault["field"] == "grammar"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(fault["message"])


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from('ab r"[]()|*+?{}1,::==\n\\-^.#x/<'), max_size=60))
def test_no_text_breaks_the_reader_of_grammars(text: str) -> None:
    for candidate in (text, f"root ::= {text}", f"start: {text}"):
        asked = grammar(candidate, "grammar")
        if asked.constraint is not None:
            try:
                answer(asked.constraint.grammar, seed=1, max_bytes=30, field="grammar")
            except InvalidRequest as error:
                assert error.details["field"] == "grammar"


@pytest.mark.parametrize(
    "text",
    [
        "root ::= r0\n"
        + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40))
        + '\nr40 ::= "c"',
        "root ::= r0\n"
        + "\n".join(f'r{i} ::= "a" r{i + 1} | r{i + 1} "b"' for i in range(390))
        + '\nr390 ::= "c"',
        'root ::= ((("a" "b" | "c"){1,1000} "x"){1,1000} "y"){1,1000}',
        "root ::= " + " | ".join(f'"w{i}"' for i in range(600)),
        "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(32)) + '\nR32: "c"',
        "start: " + " | ".join(f'"w{i}"' for i in range(1500)),
    ],
)
def test_a_hostile_grammar_takes_no_time(text: str) -> None:
    """100 ms is the bound on an idle machine; three tries and room for a busy one."""
    times = []
    for _ in range(3):
        began = time.process_time()
        asked = grammar(text, "grammar")
        if asked.constraint is not None:
            try:
                answer(asked.constraint.grammar, seed=1, max_bytes=1, field="grammar")
            except InvalidRequest:
                pass
        times.append(time.process_time() - began)
    assert min(times) < 0.25


def test_a_regular_expression_holds_for_the_whole_text() -> None:
    asked = regular_expression(r"a/b|\d{2}\/[^\n]", "guided_regex")
    assert follows(asked, "a/b") and follows(asked, "42/x") and not follows(asked, "xa/b")
    (fault,) = regular_expression("a" * 5000, "guided_regex").faults
    assert fault["field"] == "guided_regex"
    with pytest.raises(InvalidRequest, match="guided_regex cannot be enforced"):
        bad = regular_expression("(?=a)", "guided_regex").constraint
        assert bad is not None
        answer(bad.grammar, seed=1, field=bad.field)


def test_a_choice_is_one_of_its_texts() -> None:
    asked = choice(['say "hi"', "né\n", "né"], "guided_choice")
    assert follows(asked, 'say "hi"') and follows(asked, "né\n") and not follows(asked, "n")
    assert choice([], "guided_choice").faults and choice(["a"] * 2000, "guided_choice").faults
