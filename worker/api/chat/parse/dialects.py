"""The dialects in which models write function calls, chosen by the chat template.

The facts about the dialects come from the templates and from the tests of llama.cpp's own parsers.
Pure data, any thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from worker.api.chat.parse.forms import Form, JsonCall, LiteralCall, NamedCall, TaggedCall


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    template: re.Pattern[str]
    """Matches the chat templates of models that write in this dialect."""
    opens: tuple[str, ...]
    """Texts that begin a section of calls."""
    forms: tuple[Form, ...]
    """The forms of calls, tried in turn."""
    fillers: tuple[str, ...] = ()
    """Texts between and after calls that have no meaning."""
    bare: bool = False
    """Whether an answer that begins with `{` or `[` may be calls without a mark."""
    id_length: int | None = None
    """The length of call ids, if the template refuses other lengths."""

    @property
    def marks(self) -> tuple[str, ...]:
        return self.opens + self.fillers

    @property
    def beginnings(self) -> tuple[str, ...]:
        """All literal texts that may begin something in a section of calls."""
        begins = (form.begins for form in self.forms if isinstance(form, NamedCall | TaggedCall))
        return self.marks + tuple(begin for begin in begins if begin)

    @property
    def control_fillers(self) -> tuple[str, ...]:
        """Fillers that are control tokens: they are removed from the text, too."""
        return tuple(
            filler for filler in self.fillers if filler[1:2] in "|｜" or filler[-2:] == "|>"
        )


_JSON = JsonCall()
_FUNCTION_TAG = TaggedCall(
    header=re.compile(r"<function=(?P<name>[^<>\n]+)>"),
    argument=re.compile(r"<parameter=(?P<key>[^<>\n]+)>"),
    argument_end=("</parameter>",),
    end=("</function>",),
    begins="<function=",
)


def _invoke(begin: str, end: str) -> TaggedCall:
    """`<invoke name="…"><parameter name="…">…`, with `begin` and `end` around each tag."""
    return TaggedCall(
        header=re.compile(rf'{begin}invoke name="(?P<name>[^"\n]+)">'),
        argument=re.compile(
            rf'{begin}parameter name="(?P<key>[^"\n]+)"(?: string="(?P<type>true|false)")?>'
        ),
        argument_end=(f"{end}parameter>",),
        end=(f"{end}invoke>",),
        begins=f'{begin}invoke name="',
    )


GENERIC = Dialect(
    name="generic",
    template=re.compile(r"(?!)"),
    opens=("<tool_call>", "<function_call>", "[TOOL_CALLS]", "<|python_tag|>"),
    forms=(_JSON, _FUNCTION_TAG),
    fillers=("</tool_call>", "</function_call>"),
    bare=True,
)
"""For templates that show no dialect, and for the instruction that replaces tools."""

GPT_OSS = Dialect(
    name="gpt-oss",
    template=re.compile(r"<\|channel\|>[\s\S]*<\|message\|>"),
    opens=(),
    forms=(),
    fillers=("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"),
)
"""Channels carry the answer, reasoning and calls alike; `channels.py` reads them."""

FUNCTIONARY_3_2 = Dialect(
    name="functionary-3.2", template=re.compile(r">>>all\b"), opens=(), forms=()
)
"""Each part of an answer has a recipient: `recipients.py` reads them."""

DIALECTS: tuple[Dialect, ...] = (
    GPT_OSS,
    FUNCTIONARY_3_2,
    Dialect(
        name="gemma-4",
        template=re.compile(r"<\|tool_call>"),
        opens=("<|tool_call>",),
        forms=(LiteralCall("gemma", "<tool_call|>"),),
        fillers=("<tool_call|>", '<|"|>'),
    ),
    Dialect(
        name="lfm2",
        template=re.compile(r"<\|tool_call_start\|>|<\|tool_list_start\|>|List of tools: "),
        opens=("<|tool_call_start|>",),
        forms=(LiteralCall("python", "<|tool_call_end|>"),),
        fillers=("<|tool_call_end|>",),
    ),
    Dialect(
        name="kimi-k2",
        template=re.compile(r"<\|tool_call_argument_begin\|>"),
        opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        forms=(
            NamedCall(
                re.compile(
                    r"(?P<id>(?:functions\.)?(?P<name>[^<>\s]+?)(?::\d+)?)\s*"
                    r"<\|tool_call_argument_begin\|>"
                )
            ),
        ),
        fillers=("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_argument_begin|>"),
    ),
    Dialect(
        name="kimi-k3",
        template=re.compile(r"<\|open\|>[\s\S]*<\|sep\|>|open_tag[\s\S]*<\|sep\|>"),
        opens=("<|open|>tools<|sep|>", '<|open|>call tool="'),
        forms=(
            TaggedCall(
                header=re.compile(r'<\|open\|>call tool="(?P<name>[^"\n]+)"[^<]*<\|sep\|>'),
                argument=re.compile(
                    r'<\|open\|>argument key="(?P<key>[^"\n]+)"(?: type="(?P<type>\w+)")?[^<]*'
                    r"<\|sep\|>"
                ),
                argument_end=("<|close|>argument<|sep|>",),
                end=("<|close|>call<|sep|>",),
                begins='<|open|>call tool="',
            ),
        ),
        fillers=(
            "<|close|>tools<|sep|>",
            "<|close|>message<|sep|>",
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
        ),
    ),
    Dialect(
        name="deepseek-dsml",
        template=re.compile(r"DSML"),
        opens=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="'),
        forms=(_invoke("<｜DSML｜", "</｜DSML｜"),),
        fillers=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    ),
    Dialect(
        name="deepseek",
        template=re.compile(r"<｜tool▁call▁begin｜>|<｜tool▁calls▁begin｜>"),
        opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        forms=(
            NamedCall(
                re.compile(
                    r"(?:function<｜tool▁sep｜>)(?P<name>[^\n<]+)\n\s*(?:```json\s*)?(?=\{)"
                ),
                begins="function<｜tool▁sep｜>",
            ),
            NamedCall(re.compile(r"(?P<name>[^\n<{]+)<｜tool▁sep｜>\s*(?=\{)")),
        ),
        fillers=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>", "```"),
    ),
    Dialect(
        name="minimax-m3",
        template=re.compile(r"\]<\]minimax\[>\["),
        opens=("]<]minimax[>[<tool_call>", ']<]minimax[>[<invoke name="'),
        forms=(
            TaggedCall(
                header=re.compile(r'\]<\]minimax\[>\[<invoke name="(?P<name>[^"\n]+)">'),
                argument=re.compile(r"\]<\]minimax\[>\[<(?P<key>[^<>\s/\]]+)>"),
                argument_end=("]<]minimax[>[</{key}>",),
                end=("]<]minimax[>[</invoke>",),
                begins=']<]minimax[>[<invoke name="',
                nested="]<]minimax[>[",
            ),
        ),
        fillers=("]<]minimax[>[</tool_call>",),
    ),
    Dialect(
        name="minimax-m2",
        template=re.compile(r"<minimax:tool_call>"),
        opens=("<minimax:tool_call>",),
        forms=(_invoke("<", "</"),),
        fillers=("</minimax:tool_call>",),
    ),
    Dialect(
        name="atem",
        template=re.compile(r"<atem:function_calls>"),
        opens=("<atem:function_calls>",),
        forms=(_invoke("<atem:", "</atem:"),),
        fillers=("</atem:function_calls>",),
    ),
    Dialect(
        name="minicpm",
        template=re.compile(r'<function name="|<param name='),
        opens=('<function name="',),
        forms=(
            TaggedCall(
                header=re.compile(r'<function name="(?P<name>[^"\n]+)">'),
                argument=re.compile(r'<param name="(?P<key>[^"\n]+)">'),
                argument_end=("</param>",),
                end=("</function>",),
                begins='<function name="',
            ),
        ),
    ),
    Dialect(
        name="glm",
        template=re.compile(r"<arg_key>"),
        opens=("<tool_call>",),
        forms=(
            _JSON,
            TaggedCall(
                header=re.compile(r"(?P<name>[^<>{}\s]+)\s*(?=<arg_key>|</tool_call>)"),
                argument=re.compile(r"<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>"),
                argument_end=("</arg_value>",),
                end=("</tool_call>",),
            ),
        ),
        fillers=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    Dialect(
        name="hunyuan-3",
        template=re.compile(r"HYTK = ':opensource'"),
        opens=("<tool_calls:opensource>", "<tool_call:opensource>"),
        forms=(
            TaggedCall(
                header=re.compile(r"(?P<name>[^<>{}\s]+)<tool_sep:opensource>"),
                argument=re.compile(
                    r"<arg_key:opensource>(?P<key>[^<>]+)</arg_key:opensource>\s*"
                    r"<arg_value:opensource>"
                ),
                argument_end=("</arg_value:opensource>",),
                end=("</tool_call:opensource>",),
            ),
        ),
        fillers=("</tool_calls:opensource>", "<tool_sep:opensource>"),
    ),
    Dialect(
        name="function-tags",
        template=re.compile(r"<function=[\s\S]*<parameter=|<parameter=[\s\S]*<function="),
        opens=("<tool_call>", "<seed:tool_call>", "<function="),
        forms=(_FUNCTION_TAG, _JSON),
        fillers=("</tool_call>", "</seed:tool_call>"),
    ),
    Dialect(
        name="functionary",
        template=re.compile(r"<function="),
        opens=("<function=",),
        forms=(NamedCall(re.compile(r"<function=(?P<name>[^<>\n]+)>\s*(?=\{)"), "<function="),),
        fillers=("</function>",),
    ),
    Dialect(
        name="mistral",
        template=re.compile(r"\[TOOL_CALLS\]"),
        opens=("[TOOL_CALLS]",),
        forms=(
            _JSON,
            NamedCall(
                re.compile(
                    r"(?P<name>[^\[\]{}\s]+)\s*(?:\[CALL_ID\](?P<id>[A-Za-z0-9]*))?(?:\[ARGS\])?\s*"
                    r"(?=\{)"
                )
            ),
        ),
        fillers=("[ARGS]", "[CALL_ID]"),
        id_length=9,
    ),
    Dialect(
        name="cohere",
        template=re.compile(r"<\|START_ACTION\|>|\|START_THINKING\|"),
        opens=("<|START_ACTION|>",),
        forms=(_JSON,),
        fillers=(
            "<|END_ACTION|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
            "<|START_TEXT|>",
            "<|END_TEXT|>",
        ),
    ),
    Dialect(
        name="solar",
        template=re.compile(r"<\|tool_call:begin\|>"),
        opens=("<|tool_calls|>", "<|tool_call:begin|>"),
        forms=(
            NamedCall(
                re.compile(
                    r"<\|tool_call:begin\|>(?P<id>[A-Za-z0-9]*)<\|tool_call:name\|>(?P<name>[^<>\s]+)<\|tool_call:args\|>"
                ),
                begins="<|tool_call:begin|>",
            ),
        ),
        fillers=("<|tool_call:end|>", "<|tool_call:name|>", "<|tool_call:args|>"),
    ),
    Dialect(
        name="apertus",
        template=re.compile(r"<\|tools_prefix\|>"),
        opens=("<|tools_prefix|>",),
        forms=(JsonCall(name_is_key=True),),
        fillers=("<|tools_suffix|>",),
    ),
    Dialect(
        name="gigachat",
        template=re.compile(r"<\|function_call\|>|<\|message_sep\|>"),
        opens=("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>"),
        forms=(_JSON,),
    ),
    Dialect(
        name="json-lists",
        template=re.compile(r"<TOOLCALL>|<tool_calls>|functools\[|<\|tool_call\|>"),
        opens=("<TOOLCALL>", "<tool_calls>", "functools", "<|tool_call|>", "<tool_call>"),
        forms=(_JSON,),
        fillers=("</TOOLCALL>", "</tool_calls>", "</tool_call>"),
    ),
    Dialect(
        name="hermes",
        template=re.compile(r"<tool_call>"),
        opens=("<tool_call>",),
        forms=(_JSON, _FUNCTION_TAG),
        fillers=("</tool_call>",),
        bare=True,
    ),
    Dialect(
        name="llama-3",
        template=re.compile(r"<\|python_tag\|>|\"parameters\": dictionary"),
        opens=("<|python_tag|>",),
        forms=(_JSON,),
        fillers=(";",),
        bare=True,
    ),
)


def dialect_of(template: str | None) -> Dialect:
    """The dialect of a chat template."""
    found = (dialect for dialect in DIALECTS if dialect.template.search(template or ""))
    return next(found, GENERIC)
