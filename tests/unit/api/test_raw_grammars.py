"""Raw grammars, regular expressions and choices: what follows them, and what is refused."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builds import sdist
from builds.pins import pins
from tests.support import clock
from tests.support.byte_walk import accepts, answer
from worker.api.chat.constrain.constrain import constrain
from worker.api.chat.request import Choices, Expression, Format, Grammar
from worker.api.http.faults import Fault
from worker.errors import InvalidRequest

LIST = """
# a list as llama.cpp's own examples write it
root ::= item+

item ::= "- " [^\\r\\n\\x0b\\x0c]+ "\\n"
"""
SUM = 'root ::= expr "=" ws num "\\n"\nexpr ::= term ([-+*/] term)*\n'
SUM += 'term ::= num | "(" ws expr ")" ws\n'
SUM += "num ::= [0-9]+ ws\nws ::= [ \\t\\n]*\n"


def follows(asked: Format, text: str) -> bool:
    return accepts(constrain(asked).constraint.grammar, text)


def fault_of(asked: Format) -> Fault:
    with pytest.raises(InvalidRequest) as refused:
        constrain(asked)
    fault: Fault
    (fault,) = refused.value.details["errors"]
    return fault


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= [a-z]+ "end"', "friend", "en"),
        ('root ::= word "end"\nword ::= [a-z]+', "friend", "en"),
        ('root ::= ("a" | "ab") ("bc" | "d")', "abc", "ab"),
        ('root ::= | "a" ( # nothing\n| "b" )', "a", "b"),
        ('root ::=\n  "a" |\n  "b"{ 1 , 2 }\r\n', "bb", "ab"),
        ("root ::= [-a] [a-] [\\-b] [^]", "--b^", "b"),
        (LIST, "- a\n- b c\n", "- \n"),
        (SUM, "(1+2)*3= 9\n", "1+=2\n"),
        ('root ::= "a" {2,3} | [^"\\]x-z] .', "aaa", "a"),
        ('root ::= "\\u00e9\\x41\\U0001F600" | ("b" |\n "c")?', "éA😀", "d"),
        ('root ::= long-name2*\nlong-name2 ::= "\\"" | "\\\\"', '"\\"', "a"),
        ("start: WORD /[0-9]/\nWORD: /[a-z]+/", "abc1", "abc"),
    ],
)
def test_a_grammar_is_what_it_says(text: str, good: str, bad: str) -> None:
    asked = Grammar(text, "grammar")
    assert follows(asked, good) and not follows(asked, bad)


OF_LLAMA_CPP = {
    "arithmetic": "(a +2)*b1 = 9\n",
    "c": "int main(){int abc = 1;return iff;}",
    "chess": "1. e4 e5\n2. Nf3 Nc6\n",
    "english": "Hi, you",
    "japanese": "ひら カタ",
    "json": '{"a": [1.5e3, true]}',
    "json_arr": '[\n{"a": "é"}]',
    "list": "- a\n- b c\n",
}


@pytest.mark.parametrize("name", OF_LLAMA_CPP)
def test_a_grammar_of_llama_cpp_is_followed(name: str) -> None:
    text = (sdist.unpacked(pins()) / f"vendor/llama.cpp/grammars/{name}.gbnf").read_text()
    asked = Grammar(text, "grammar")
    assert follows(asked, OF_LLAMA_CPP[name]) and not follows(asked, OF_LLAMA_CPP[name] + "\0")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("root ::= (", r"line 1: expected \)"),
        ("root ::= missing", "no rule 'missing'"),
        ('other ::= "a"', "no rule 'root'"),
        ("root := 1", "line 1: expected ::="),
        ('root ::= "a', "a text has no end"),
        ('root ::= "\\q"', "an unknown escape"),
        ("root ::= []", "no characters"),
        ('root ::= "a"?*', "must follow a part"),
        ('root ::= "a" | *', "must follow a part"),
        ('root ::= "a")', "expected the end of the rule"),
        ('root ::= "a" b ::= "c"', "expected the end of the rule"),
        ('root ::= "a"\n"b"', "line 2: expected ::="),
        ("root ::= [z-a]", "goes backwards"),
        ('root ::= "\\ud800"', "not a Unicode character"),
        ('root ::= "a"{x}', "expected {n}"),
        ('root ::= "a"{9999999}', "repetitions"),
        ("root ::= <think>", "tokens cannot be named"),
        ("root ::= " + "(" * 9999, "nested too deeply"),
        ("root ::= " + '"a"' * 20_000, "characters"),
        ("\n".join(f'r{i} ::= r{i + 1} "a"' for i in range(500)), "rules"),
        ("start: %json {}", "%json"),
        ("start: a\n" + "\n" * 999, "lines"),
        ("", "no rule 'root'"),
    ],
)
def test_a_grammar_that_is_none_is_refused_by_name(text: str, reason: str) -> None:
    fault = fault_of(Grammar(text, "grammar"))
    assert fault["field"] == "grammar" and re.search(reason, fault["message"])


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from('ab r"[]()|*+?{}1,::==\n\\-^.#x/<'), max_size=60))
def test_no_text_breaks_the_reader_of_grammars(text: str) -> None:
    for candidate in (text, f"root ::= {text}", f"start: {text}"):
        try:
            found = constrain(Grammar(candidate, "grammar")).constraint
        except InvalidRequest as error:
            assert [fault["field"] for fault in error.details["errors"]] == ["grammar"]
            continue
        try:
            answer(found.grammar, seed=1, max_bytes=30, field=found.field)
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
        with suppress(InvalidRequest):
            found = constrain(Grammar(text, "grammar")).constraint
            answer(found.grammar, seed=1, max_bytes=1, field="grammar")
        times.append(time.process_time() - began)
    assert min(times) < 0.25 * clock.slowness()


def test_a_regular_expression_holds_for_the_whole_text() -> None:
    asked = Expression(r"a/b|\d{2}\/[^\n]", "guided_regex")
    assert follows(asked, "a/b") and follows(asked, "42/x") and not follows(asked, "xa/b")
    for pattern in ("a" * 5000, ""):
        assert fault_of(Expression(pattern, "guided_regex"))["field"] == "guided_regex"
    with pytest.raises(InvalidRequest, match="guided_regex cannot be enforced"):
        bad = constrain(Expression("(?=a)", "guided_regex")).constraint
        answer(bad.grammar, seed=1, field=bad.field)


def test_a_choice_is_one_of_its_texts() -> None:
    asked = Choices(('say "hi"', "né\n", "né"), "guided_choice")
    assert follows(asked, 'say "hi"') and follows(asked, "né\n") and not follows(asked, "n")
    for texts in ((), ("a",) * 2000):
        assert fault_of(Choices(texts, "guided_choice"))["field"] == "guided_choice"
