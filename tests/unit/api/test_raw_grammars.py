"""Raw grammars, regular expressions and choices: which answers follow them, and which are
refused."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builds import sdist
from builds.pins import pins
from tests.support import clock
from tests.support.byte_walk import accepts, answer, byte_tokenizer
from worker.api.chat.constrain import sizes
from worker.api.chat.constrain.constrain import constrain
from worker.api.chat.request import (
    Choices,
    Expression,
    ForcedCalls,
    Format,
    Grammar,
    JsonSchema,
    TextForm,
    Tool,
    custom_tool,
)
from worker.api.http.faults import Fault
from worker.errors import InvalidRequest
from worker.llama.constraint import compile_grammar

LIST = """
# a list as llama.cpp's own examples write it
root ::= item+

item ::= "- " [^\\r\\n\\x0b\\x0c]+ "\\n"
"""
SUM = 'root ::= expr "=" ws num "\\n"\nexpr ::= term ([-+*/] term)*\n'
SUM += 'term ::= num | "(" ws expr ")" ws\n'
SUM += "num ::= [0-9]+ ws\nws ::= [ \\t\\n]*\n"


def follows(form: Format, text: str) -> bool:
    return accepts(constrain(form).constraint.grammar, text)


def fault_of(form: Format) -> Fault:
    with pytest.raises(InvalidRequest) as refused:
        constrain(form)
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
        ('root ::= "b" "a"{0} ("c" | "d"){0,0} "e"{0,}', "bee", "ba"),
        ("start: WORD /[0-9]/\nWORD: /[a-z]+/", "abc1", "abc"),
    ],
)
def test_a_grammar_is_followed(text: str, good: str, bad: str) -> None:
    grammar = Grammar(text, "grammar")
    assert follows(grammar, good) and not follows(grammar, bad)


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
    grammar = Grammar(text, "grammar")
    assert follows(grammar, OF_LLAMA_CPP[name]) and not follows(grammar, OF_LLAMA_CPP[name] + "\0")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("root ::= (", r"line 1: expected \)"),
        ("root ::= missing", "no rule 'missing'"),
        ('other ::= "a"', "no rule 'root'"),
        ("root := 1", "line 1: expected ::="),
        ('root ::= "a', "a text is not closed"),
        ('root ::= "\\q"', "an unknown escape"),
        ("root ::= []", "is empty"),
        ('root ::= "a"?*', "must follow a part"),
        ('root ::= "a" | *', "must follow a part"),
        ('root ::= "a")', "expected the end of the rule"),
        ('root ::= "a" b ::= "c"', "expected the end of the rule"),
        ('root ::= "a"\n"b"', "line 2: expected ::="),
        ("root ::= [z-a]", "goes backwards"),
        ('root ::= "\\ud800"', "not a Unicode character"),
        ('root ::= "a"{x}', "expected {n}"),
        ('root ::= "a"{9999999}', "repetitions"),
        ('root ::= (("a"{1000} "b"){,9} | "c")', "expected {n}"),
        ('root ::= (("a"{1000} "b"){9,} | "c"){12}', "nested repetitions"),
        ('root ::= ("a" | (("b" root){0,100000})? ){1000,}', "nested repetitions"),
        ("start: /(a{200}){200}/", "repeats too often"),
        ("start: A\nA: B{1000}\nB: C{1000}\nC: /x/", "repeats too often"),
        ('start: A\nA: "x" ~ 3..30000', "repeats too often"),
        ("%ignore /x{4294967295}/\nstart: /y/", "repeats too often"),
        ("root ::= <think>", "tokens cannot be named"),
        ("root ::= " + "(" * 9999, "nested too deeply"),
        ("root ::= " + '"a"' * 20_000, "characters"),
        ("root ::= " + "[a]" * 2001, "more than 4000 symbols"),
        ("\n".join(f'r{i} ::= r{i + 1} "a"' for i in range(500)), "rules"),
        ("start: %json {}", "%json"),
        ("start: a\n" + "\n" * 999, "lines"),
        ("", "no rule 'root'"),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_reason(text: str, reason: str) -> None:
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
        "start: R0\n" + "\n".join(f"R{i}: R{i + 1}" for i in range(390)) + '\nR390: "c"',
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
    assert clock.within(min(times), 0.25)


def test_a_regular_expression_holds_for_the_whole_text() -> None:
    form = Expression(r"a/b|\d{2}\/[^\n]", "guided_regex")
    assert follows(form, "a/b") and follows(form, "42/x") and not follows(form, "xa/b")
    for pattern in ("a" * 5000, ""):
        assert fault_of(Expression(pattern, "guided_regex"))["field"] == "guided_regex"
    bad = constrain(Expression("(?=a)", "guided_regex")).constraint
    with pytest.raises(InvalidRequest, match="guided_regex cannot be enforced"):
        answer(bad.grammar, seed=1, field=bad.field)
    assert constrain(forced("(?>a)", "regex")).not_enforced == ("tools[0].format",)


def forced(definition: str, syntax: Any = "lark") -> ForcedCalls:
    """Return the forced call of a custom tool whose text has a format."""
    form = TextForm(syntax, definition, "tools[0].format")
    return ForcedCalls((custom_tool("edit", None, "tools[0]", form),))


def test_a_call_of_a_custom_tool_beside_a_schema_follows_its_form() -> None:
    edit, free = *forced("[a-c]+", "regex").tools, Tool("free", "t")
    for tools in ((edit, free), (edit,)):
        schema = JsonSchema({"type": "null"}, "s", strict=True, calls=tools)
        call = '{"name": "%s", "arguments": %s}'
        assert follows(schema, call % ("edit", '{"input": "abc"}')) and follows(schema, "null")
        assert not follows(schema, call % ("edit", '{"input": "abd"}'))
        assert follows(schema, call % ("free", '{"any": 1}')) is (free in tools)
    open_form = forced("(?=a)", "regex").tools
    schema = JsonSchema({"type": "null"}, "s", strict=True, calls=open_form)
    assert constrain(schema).not_enforced == ("tools[0].format",), "strict is about the schema"
    with pytest.raises(InvalidRequest):
        constrain(schema, strict=True)


PATCH = """
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

hunk: add | update
add: "*** Add File: " filename LF line+
update: "*** Update File: " filename LF move? change?
filename: /(.+)/
line: "+" /(.*)/ LF -> line
move: "*** Move to: " filename LF
change: (("@@" | "@@ " /(.+)/) LF | ("+" | "-" | " ") /(.*)/ LF)+
%import common.LF
"""
"""Codex's grammar for patches."""


@pytest.mark.parametrize(
    ("syntax", "form", "good", "bad"),
    [
        ("lark", PATCH, '*** Begin Patch\n*** Add File: a\n+é "b"\\\n*** End Patch', "*** Begin"),
        ("lark", PATCH, "*** Begin Patch\n*** Update File: a\n@@\n-b\n*** End Patch\n", "@@"),
        ("lark", '?start: A -> a\n  | "(b)."i // c\nA.2: /x\\/y/', "(B).", "xy"),
        ("lark", 'start: "a" ~ 2..3 "b"{2} ["c"] "d"{,1} "\\t\\""', 'aabbc\t"', 'abb\t"'),
        ("lark", "start: W LF\n%import common.WORD -> W\n%import common (LF, LF)", "ab\n", "1\n"),
        ("lark", r'start: "\x61.\u0062\\"', "a.b\\", "a.b"),
        ("regex", r"^[a-c]+\s\p{Lu}(?<n>x|y)$", "ab Éy", "ab éy"),
        ("regex", r"(?s).+", "a\nb", ""),
    ],
)
def test_a_forced_call_of_a_custom_tool_follows_its_format(
    syntax: str, form: str, good: str, bad: str
) -> None:
    found = constrain(forced(form, syntax))
    assert found.not_enforced == ()
    for text, fits in ((good, True), (bad, False)):
        call = json.dumps({"name": "edit", "arguments": {"input": text}}, ensure_ascii=False)
        assert accepts(found.constraint.grammar, call) == fits


@pytest.mark.parametrize(
    "form",
    [
        'start: "(" start ")" | "x"',
        'start: a{"x"}\na{b}: b',
        'start: "a" " "\n%ignore " "',
        'start: "a".."z"',
        "start: X\n%import common.ESCAPED_STRING -> X",
        "start: A" + "".join(f"\nA{'A' * n}: A{'A' * (n + 1)} ~ 2..2" for n in range(20))
        + f'\n{"A" * 21}: "{"x" * 900}"',
        "start: /a{30000}/",
        r'start: "\d"',
        r'start: "\b"',
        "start: /a # (/x",
        "start: /(?x)a # (/",
        "start: " + "a " * 6800 + "\na: " + "b " * 990 + "\nb:",
        "a" * 20_000,
    ],
)  # fmt: skip
def test_a_format_that_cannot_be_enforced_is_named_and_strict_refuses_it(form: str) -> None:
    schema, began = forced(form), time.process_time()
    assert constrain(schema).not_enforced == ("tools[0].format",)
    assert clock.within(time.process_time() - began, 0.15)
    with pytest.raises(InvalidRequest, match=r"tools\[0\].format cannot be enforced"):
        constrain(schema, strict=True)


@pytest.mark.parametrize(
    ("syntax", "form", "reason"),
    [
        ("lark", 'start: (\n  | "a"', r"line 1: missing \)"),
        ("lark", 'start: a\n\nb: "c"', "line 1: there is no 'a'"),
        ("lark", 'begin: "a"', "there is no 'start'"),
        ("lark", 'start: "a"\n  | "b', "line 2: unexpected"),
        ("lark", 'start: a\na: ? "b"', "line 2: nothing to repeat"),
        ("lark", 'start: a\na "b"', "line 2: expected ':'"),
        ("lark", "start: A\nA: /[b/", "line 2: an expression is not valid: unterminated"),
        ("lark", 'start: "a"\n?start: "b"', "line 2: 'start' is defined twice"),
        ("lark", '%import common.WS\nstart: WS\nWS: " "', "line 3: 'WS' is defined twice"),
        ("lark", "12", "line 1: expected a name"),
        ("lark", "", "there is no 'start'"),
        ("regex", "a(b", r"missing \), unterminated subpattern, at character 2"),
        ("regex", "[a", "unterminated character set"),
    ],
)
def test_an_invalid_format_of_a_custom_tool_is_refused(syntax: str, form: str, reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        constrain(forced(form, syntax))
    (fault,) = refused.value.details["errors"]
    assert fault["field"] == "tools[0].format.definition" and re.search(reason, fault["message"])


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from('ab r"[]()|*+?{}1,::~>\n\\-^.#x/<%A'), max_size=60))
def test_no_text_breaks_the_reader_of_formats(text: str) -> None:
    for syntax, form in (("lark", text), ("lark", f"start: {text}"), ("regex", text)):
        try:
            found = constrain(forced(form, syntax)).constraint
        except InvalidRequest as error:
            assert [f["field"] for f in error.details["errors"]] == ["tools[0].format.definition"]
            continue
        with suppress(InvalidRequest):  # an expression that Rust's engine does not support
            answer(found.grammar, seed=1, max_bytes=30, field=found.field)


HUGE = [
    "^x{4294967295}$",
    "((a{100}){100}){100}",
    "x{99999999999999999999}",
    "[+-[]x{30000}",
    "[]]x{30000,}",
    r"\x{41}{30000}",
    "(?x)[a - [b]x{30000}[c]]",
    "x*x{19000}",
    "(x{100,}){50}",
    "x{1,40}" * 480,
]
LARGE = [
    r"^(\w{1,30}\s){0,100}$",
    r"([a-z0-9-]{1,63}\.){1,127}",
    "x{20000}",
    "é{6000}",
    "x*x{1000}",
    "[{5000}]{3}",
    r"\p{Lu}{1,50}\x{4e00}",
    r"^(https?|ftp)://[^\s/$.?#].[^\s]*$",
    r"^((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)$",
]


@pytest.mark.parametrize("pattern", HUGE)
def test_an_expression_that_repeats_too_often_is_refused(pattern: str) -> None:
    fault = fault_of(Expression(pattern, "guided_regex"))
    assert fault["field"] == "guided_regex"
    schema = JsonSchema({"type": "string", "pattern": pattern}, "s")
    assert constrain(schema).not_enforced == ("s.pattern",)
    assert fault_of(Grammar(f"start: /{pattern}/", "grammar"))["field"] == "grammar"


@pytest.mark.parametrize("pattern", LARGE)
def test_an_expression_with_many_repetitions_is_followed(pattern: str) -> None:
    began = time.process_time()
    found = constrain(Expression(pattern.replace("/", r"\/"), "guided_regex")).constraint
    answer(found.grammar, seed=1, max_bytes=1)
    assert clock.within(time.process_time() - began, 0.3)


PIECES = r"a é . \w \x{4e00} [a-z] [^a] [x] [ ] ( ) (?: | * + ? {2} {30} {700,} {0,9000} {1,20}"


@settings(max_examples=300, deadline=None)
@given(text=st.lists(st.sampled_from([*PIECES.split(), "{", "\\", "(?x)", "#", "/"])).map("".join))
def test_an_expression_is_refused_or_compiles_at_once(text: str) -> None:
    for form in (Expression(text, "g"), Grammar(f"start: T\nT: /{text}/{{3}}", "g")):
        began = time.process_time()
        with suppress(InvalidRequest):
            answer(constrain(form).constraint.grammar, seed=1, max_bytes=1, field="g")
        assert clock.within(time.process_time() - began, 0.4)


@pytest.mark.parametrize(
    "unit", ["(", "[", "[a-", "{1", "{ ", "\\x{", "(a{2}|", "a{9}", "(?x", "[[:"]
)
def test_a_size_is_read_in_linear_time(unit: str) -> None:
    def seconds(n: int) -> float:
        times = []
        for _ in range(3):
            began = time.process_time()
            sizes.size(unit * n)
            times.append(time.process_time() - began)
        return min(times)

    assert seconds(8000) < 12 * seconds(2000) + 0.01


RECURSIVE = r"""
root ::= ((("\x00" | "x") [\x00-\x1f]) | [^\n]) | (more?){1000,}
more ::= root{0,100000}
"""


def test_an_ambiguous_grammar_is_given_up_at_once() -> None:
    grammar = constrain(Grammar(RECURSIVE, "grammar")).constraint.grammar
    matcher = compile_grammar(byte_tokenizer(), grammar, "grammar")
    times = []
    while not matcher.is_error():
        began = time.process_time()
        matcher.compute_bitmask()
        matcher.consume_token(ord("x"))
        times.append(time.process_time() - began)
    assert clock.within(sum(times), 0.4) and clock.within(max(times), 0.1)


def test_a_choice_is_one_of_its_texts() -> None:
    choices = Choices(('say "hi"', "né\n", "né"), "guided_choice")
    assert follows(choices, 'say "hi"') and follows(choices, "né\n") and not follows(choices, "n")
    for texts in ((), ("a",) * 2000):
        assert fault_of(Choices(texts, "guided_choice"))["field"] == "guided_choice"
