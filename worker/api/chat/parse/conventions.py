"""How models write reasoning and function calls: a table; the chat template selects the row.

The facts come from the templates and from the tests of llama.cpp's own parsers. Pure data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Final, Literal

from worker.api.chat.parse.literal_calls import GEMMA, PYTHON, UNESCAPED, Notation
from worker.api.chat.parse.source import Header
from worker.api.chat.parse.tagged_calls import Tags
from worker.wire.sampling import ReasoningRules

_TAG: Final = re.compile(r"<\w[\w:|]*>")
_CALL_TAG: Final = re.compile(
    r"(?i:<\|?[\w:|]*(?:tool|function)_?calls?\|?>)|functools(?=\[)|<\|action_start\|><\|plugin\|>"
)
_WRAP: Final = re.compile(r"</(answer|response)>")
_TOKEN: Final = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True, slots=True)
class Form:
    """How one call is written: a header, then its arguments."""

    header: Header
    arguments: Tags | Notation | Literal["json", "code", "object", "exact", "keyed"]
    """- `Tags`: texts in tags. `Notation`: parsed as a whole.
    - `json`: one JSON value. `code`: the same, or code up to the next call.
    - `object`: a JSON object `{"name": …, "arguments": …}`. `exact`: the same, as a grammar has it.
      `keyed`: `{"NAME": …}`."""
    end: str = ""
    """The text that ends a `Notation`, if it is not the bracket that the header opens."""


@dataclass(frozen=True, slots=True, eq=False)
class Convention:
    """How a model writes calls in an answer."""

    opens: tuple[str, ...]
    """Texts that begin a section of calls."""
    forms: tuple[Form, ...]
    """The forms of calls, tried in turn."""
    template: str = ""
    """A pattern for the chat templates of such models; by default, the first of `opens`."""
    ends: tuple[str, ...] = ()
    """Texts after calls that are dropped, besides the end tags of `opens`."""
    between: str = ""
    """Characters, besides white space, that may separate calls."""
    gap: str = ""
    """Line ends between an answer's text and a section; no others are dropped from the text."""
    frames: tuple[str, ...] = ()
    """Texts around an answer's text, which are dropped."""
    bare: bool = False
    """Whether an answer that begins with `{` or `[` may be calls without a mark."""
    always_framed: bool = False
    """Whether every part of an answer has frames, with or without calls."""
    id_length: int | None = None
    """The length of call ids, if the template refuses other lengths."""

    def is_shown_by(self, template: str) -> bool:
        pattern = self.template or re.escape(self.opens[0])
        return re.search(pattern, template) is not None

    @property
    def closes(self) -> tuple[str, ...]:
        """Texts after calls that are dropped: `ends`, the end tags of `opens`, and the bracket that
        ends a list of calls."""
        tags = (f"</{text[1:]}" for text in self.opens if _TAG.fullmatch(text))
        return (*self.ends, *tags, *("]" if "[" in self.between else ""))

    @property
    def begins(self) -> tuple[str, ...]:
        """Tags that begin a call's header, which then needs no section."""
        firsts = (form.header.parts[0] for form in self.forms)
        return tuple(first for first in firsts if first.startswith(("<", "]<")))

    @property
    def texts(self) -> Iterator[str]:
        """All texts that mark calls or frames."""
        yield from (*self.opens, *self.closes, *self.frames)
        for form in self.forms:
            yield from (*form.header.texts, form.end)
            if isinstance(form.arguments, Tags):
                for header, end in form.arguments.arguments:
                    yield from (*header.texts, end)
                yield form.arguments.end
            elif form.arguments is GEMMA:
                yield from GEMMA.quotes


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its reasoning, which is between `begin` and `end` at an answer's start.

    `pads` are the line ends that templates put after `begin`, before `end` and after `end`. Only
    these are dropped with the marks.
    """

    template: str
    begin: str
    end: str
    pads: tuple[str, str, str] = ("", "", "")
    anywhere: bool = False
    """Whether reasoning may also begin in the middle of an answer."""
    also: str = ""
    """A shorter form of `begin`."""


def _json(*headers: str) -> tuple[Form, ...]:
    return tuple(Form(Header(header), "json") for header in headers)


def _tags(
    header: str, *arguments: tuple[str, str], end: str, pad: str = "", nested: str = ""
) -> Form:
    pairs = tuple((Header(before), after) for before, after in arguments)
    return Form(Header(header), Tags(pairs, end, pad, nested))


def _invoke(begin: str, end: str, before: str = "") -> Form:
    """`<invoke name="…"><parameter name="…">…`, with `begin` and `end` around each tag."""
    return _tags(
        f'{before}{begin}invoke name="{{name}}">',
        (f'{begin}parameter name="{{key}}" string="{{type}}">', f"{end}parameter>"),
        (f'{begin}parameter name="{{key}}">', f"{end}parameter>"),
        end=f"{end}invoke>",
    )


def _function_tag(pad: str) -> Form:
    parameter = ("<parameter={key}>", "</parameter>")
    return _tags("<function={name}>", parameter, end="</function>", pad=pad)


def _key_tags(name: str, suffix: str = "") -> Form:
    before = f"<arg_key{suffix}>{{key}}</arg_key{suffix}>~<arg_value{suffix}>"
    argument = (before, f"</arg_value{suffix}>")
    return _tags(name, argument, end=f"</tool_call{suffix}>")


_OBJECT: Final = Form(Header("{"), "object")
_PYTHON: Final = Form(Header("{name}("), PYTHON)
_LISTS: Final = "[,"
_M3: Final = "]<]minimax[>["

GENERIC: Final = Convention(
    opens=(
        *("<tool_call>", "<function_call>", "[TOOL_CALLS]", "<|python_tag|>"),
        "<|action_start|><|plugin|>",
    ),
    forms=(_OBJECT, _function_tag("\n"), _invoke("<", "</"), _PYTHON),
    ends=("<|action_end|>",),
    between=_LISTS,
    gap="\n",
    bare=True,
)
"""For templates that show no convention, and for tools that are described in words."""

BESIDE_JSON: Final = Convention(opens=(), forms=(Form(Header("{"), "exact"),), bare=True)
"""For an answer whose grammar allows JSON under a schema, or else one call."""

TAGGED: Final = replace(GENERIC, template=_CALL_TAG.pattern)
"""For templates that put calls of these forms in tags that are named after calls: Hermes, Qwen,
Granite, Nemotron 2, MiniMax M1 and M2, Apriel, Olmo 3, InternLM 2 and many more."""

CONVENTIONS: Final = (
    Convention(  # gpt-oss: every part of an answer has a channel, a call also a recipient
        template=r"<\|channel\|>[\s\S]*<\|message\|>",
        opens=("<|start|>assistant", "<|channel|>"),
        forms=_json(
            "commentary~to={name}{any}<|message|>",
            "analysis~to={name}{any}<|message|>",
            "~to={name}<|channel|>{any}<|message|>",
        ),
        ends=("<|call|>", "<|end|>", "<|return|>"),
        frames=(
            *(
                f"{start}<|channel|>{channel}<|message|>"
                for channel in ("final", "final <|constrain|>json", "commentary")
                for start in ("", "<|start|>assistant")
            ),
            *("<|end|>", "<|return|>"),
        ),
        always_framed=True,
    ),
    Convention(  # functionary 3.2: every part has a recipient; `all` is the user
        template=r">>>all\b",
        opens=(">>>",),
        forms=(Form(Header("{name}\n"), "code"),),
        frames=(">>>all\n",),
        always_framed=True,
    ),
    Convention(  # Gemma 4 and FunctionGemma
        template=r"<\|tool_call>|<start_function_call>",
        opens=("<|tool_call>", "<start_function_call>"),
        forms=(Form(Header("call:{name}~{"), GEMMA),),
        ends=("<tool_call|>", "<end_function_call>"),
        frames=("<|channel>", "<channel|>"),
    ),
    Convention(  # LFM 2.5: texts are between quotes, without escapes
        template=r"""["]'["] \+ arg_value \+ ["]'["][\s\S]*<\|tool_call_start\|>""",
        opens=("<|tool_call_start|>",),
        forms=tuple(
            Form(Header(header), UNESCAPED, "<|tool_call_end|>")
            for header in ("[~{name}(", "{name}(")
        ),
    ),
    Convention(  # LFM 2
        template=r"<\|tool_call_start\|>|<\|tool_list_start\|>|List of tools: ",
        opens=("<|tool_call_start|>",),
        forms=(_PYTHON,),
        ends=("<|tool_call_end|>",),
        between=_LISTS,
    ),
    Convention(  # Kimi K2
        template=r"<\|tool_call_argument_begin\|>",
        opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        forms=_json("{id}~<|tool_call_argument_begin|>"),
        ends=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    Convention(  # Kimi K3
        template=r"<\|open\|>[\s\S]*<\|sep\|>|open_tag[\s\S]*<\|sep\|>",
        opens=("<|open|>tools<|sep|>",),
        forms=(
            _tags(
                '<|open|>call tool="{name}"{any}<|sep|>',
                ('<|open|>argument key="{key}" type="{type}"<|sep|>', "<|close|>argument<|sep|>"),
                ('<|open|>argument key="{key}"<|sep|>', "<|close|>argument<|sep|>"),
                end="<|close|>call<|sep|>",
            ),
        ),
        ends=("<|close|>tools<|sep|>", "<|close|>message<|sep|>"),
        frames=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    Convention(  # DeepSeek V3.2 and V4
        template=r"DSML",
        opens=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        forms=(_invoke("<｜DSML｜", "</｜DSML｜"),),
        ends=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
        gap="\n\n",
    ),
    Convention(  # DeepSeek R1, V3 and V3.1
        template=r"<｜tool▁call▁begin｜>|<｜tool▁calls▁begin｜>",
        opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        forms=_json(
            "function<｜tool▁sep｜>{name}\n~```json~",
            "function<｜tool▁sep｜>{name}\n",
            "{name}<｜tool▁sep｜>",
        ),
        ends=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    Convention(  # MiniMax M3
        template=r"\]<\]minimax\[>\[",
        opens=(f"{_M3}<tool_call>",),
        forms=(
            _tags(
                f'{_M3}<invoke name="{{name}}">',
                (f"{_M3}<{{key}}>", f"{_M3}</{{key}}>"),
                end=f"{_M3}</invoke>",
                nested=_M3,
            ),
        ),
        ends=(f"{_M3}</tool_call>",),
        gap="\n",
    ),
    Convention(  # Muse: every part has a recipient, such as `user`
        template=r"<atem:function_calls>",
        opens=("<|start|>assistant", "<atem:function_calls>"),
        forms=(
            _invoke("<atem:", "</atem:"),
            _invoke("<atem:", "</atem:", "~to={name}<|message|>~<atem:function_calls>~"),
        ),
        ends=("<|eom|>", "<|eot|>"),
        frames=("<|start|>assistant to=user<|message|>", "<|eom|>", "<|eot|>"),
        always_framed=True,
    ),
    Convention(  # MiniCPM 5
        template=r"<param name=",
        opens=(),
        forms=(
            _tags(
                '<function name="{name}">',
                ('<param name="{key}"><![CDATA[', "]]></param>"),
                ('<param name="{key}">', "</param>"),
                end="</function>",
            ),
        ),
        gap="\n",
    ),
    Convention(  # GLM 4 and models that write like it
        template=r"<arg_key>",
        opens=("<tool_call>",),
        forms=(_OBJECT, _key_tags("{name}")),
        gap="\n",
    ),
    Convention(  # Hunyuan 3
        template=r"HYTK = ':opensource'",
        opens=("<tool_calls:opensource>", "<tool_call:opensource>"),
        forms=(_key_tags("{name}<tool_sep:opensource>", ":opensource"),),
        gap="\n",
    ),
    Convention(  # Seed OSS
        opens=("<seed:tool_call>",),
        forms=(_function_tag(""), _OBJECT),
        gap="\n\n",
    ),
    Convention(  # Qwen 3 Coder and models that write like it
        template=r"<function=[\s\S]*<parameter=|<parameter=[\s\S]*<function=",
        opens=("<tool_call>",),
        forms=(_function_tag("\n"), _OBJECT),
        gap="\n\n",
    ),
    Convention(  # functionary 3.1
        template=r"<function=",
        opens=(),
        forms=_json("<function={name}>"),
        ends=("</function>",),
    ),
    Convention(  # Mistral
        opens=("[TOOL_CALLS]",),
        forms=(
            _OBJECT,
            *_json("{name}~[CALL_ID]{id}[ARGS]", "{name}~[CALL_ID][ARGS]", "{name}~[ARGS]"),
            *_json("{name}"),
        ),
        between=_LISTS,
        id_length=9,
    ),
    Convention(  # Cohere
        template=r"<\|START_ACTION\|>|\|START_THINKING\|",
        opens=("<|START_ACTION|>",),
        forms=(_OBJECT,),
        ends=("<|END_ACTION|>",),
        between=_LISTS,
        frames=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Convention(  # Solar
        template=r"<\|tool_call:begin\|>",
        opens=("<|tool_calls|>",),
        forms=_json(
            "<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>",
            "<|tool_call:begin|><|tool_call:name|>{name}<|tool_call:args|>",
        ),
        ends=("<|tool_call:end|>", "<|calls|>"),
        frames=("<|begin|>assistant", "<|content|>", "<|begin|>assistant<|content|>"),
    ),
    Convention(  # Apertus
        opens=("<|tools_prefix|>",),
        forms=(Form(Header("{"), "keyed"),),
        ends=("<|tools_suffix|>",),
        between=_LISTS,
    ),
    Convention(  # GigaChat
        template=r"<\|function_call\|>|<\|message_sep\|>",
        opens=("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>"),
        forms=(_OBJECT,),
        ends=("<|message_sep|>",),
    ),
    TAGGED,
    Convention(  # Llama 3 and 4
        template=r"<\|python_(?:tag|start)\|>|\"parameters\": dictionary",
        opens=("<|python_tag|>", "<|python_start|>"),
        forms=GENERIC.forms,
        ends=("<|python_end|>",),
        between=_LISTS + ";",
        bare=True,
    ),
)

_LINES: Final = ("\n", "\n", "\n\n")
THINK: Final = Thinking(r"</think>", "<think>", "</think>", _LINES)
THINKING: Final = (
    Thinking(
        r"<\|channel\|>[\s\S]*<\|message\|>",
        "<|start|>assistant<|channel|>analysis<|message|>",
        "<|end|>",
        anywhere=True,
        also="<|channel|>analysis<|message|>",
    ),
    Thinking(
        r"<atem:function_calls>", "<|start|>assistant to=self<|message|>", "<|eom|>", anywhere=True
    ),
    Thinking(r"<seed:think>", "<seed:think>", "</seed:think>", ("", "", "\n")),
    Thinking(r"<mm:think>", "<mm:think>", "</mm:think>"),
    Thinking(r"HYTK = ':opensource'", "<think:opensource>", "</think:opensource>"),
    Thinking(r"\[THINK\]", "[THINK]", "[/THINK]", anywhere=True),
    Thinking(r"<\|START_THINKING\|>", "<|START_THINKING|>", "<|END_THINKING|>", anywhere=True),
    Thinking(r"<\|channel>", "<|channel>thought", "<channel|>", ("\n", "\n", ""), anywhere=True),
    Thinking(r"<\|close\|>|close_tag", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    Thinking(r"<\|begin\|>[\s\S]*<\|think\|>", "<|think|>", "<|end|>"),
    Thinking(
        r"\[BEGIN FINAL RESPONSE\]",
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        ("\n", "\n", "\n"),
    ),
    THINK,
    *(Thinking(f"</{tag}>", f"<{tag}>", f"</{tag}>", _LINES) for tag in ("thinking", "thought")),
)


@dataclass(frozen=True, eq=False)
class Conventions:
    """How a model writes its answers, as its chat template shows."""

    calls: Convention
    thinking: Thinking
    wrap: str = ""
    """The tag around an answer's text after reasoning, as in Granite 3, Hunyuan and Ernie."""

    @cached_property
    def reasoning(self) -> ReasoningRules:
        """The marks of reasoning for the engine, without a budget."""
        thinking = self.thinking
        return ReasoningRules(
            begins=tuple(mark for mark in (thinking.begin, thinking.also) if mark),
            end=thinking.end,
            closing=thinking.pads[1] + thinking.end,
            anywhere=thinking.anywhere,
        )

    @cached_property
    def shown_tokens(self) -> Mapping[tuple[bool, bool], tuple[str, ...]]:
        """Control tokens that the engine must show as text, by whether calls are parsed and whether
        reasoning is split off."""
        found = {}
        for calls, reasoning in product((False, True), repeat=2):
            texts = list[str]()
            if reasoning:
                texts += [self.thinking.begin, self.thinking.end, *self.calls.frames]
                texts += [f"<{self.wrap}>", f"</{self.wrap}>"]
            if calls or self.calls.always_framed:
                texts += self.calls.texts
            parts = (part for text in texts for part in (text, *_TOKEN.findall(text)) if part)
            found[calls, reasoning] = tuple(dict.fromkeys(parts))
        return found


@lru_cache(maxsize=8)
def conventions_of(template: str | None, *, takes_tools: bool = True) -> Conventions:
    """How a model with this template writes. `takes_tools`: the template renders tools itself."""
    text = template or ""
    calls = next((each for each in CONVENTIONS if each.is_shown_by(text)), GENERIC)
    if calls is TAGGED:
        calls = replace(TAGGED, opens=tuple(dict.fromkeys(_CALL_TAG.findall(text))))
    if calls is not GENERIC and not takes_tools:
        calls = _also_generic(calls)
    thinking = (each for each in THINKING if re.search(each.template, text))
    wrap = _WRAP.search(text)
    return Conventions(calls, next(thinking, THINK), wrap[1] if wrap is not None else "")


def _also_generic(own: Convention) -> Convention:
    """The convention for a template that shows calls but takes no tools. The model may write calls
    as it learned to, or as the engine's description of the tools asks it to."""
    return replace(
        own,
        opens=own.opens + GENERIC.opens,
        forms=own.forms + GENERIC.forms,
        between=GENERIC.between,
        gap=GENERIC.gap,
        bare=True,
    )
