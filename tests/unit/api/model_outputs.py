"""Outputs of models of each dialect and their meaning, from llama.cpp's tests of its parsers.

Calls and reasoning as templates write them are generated in `test_round_trips`. A case is:
template, output, content, reasoning, calls, and `prompt_end` if the template has begun the answer.
The functions are in `TOOLS`.
"""

from __future__ import annotations

from typing import Any, NamedTuple


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


INTEGER, STRING = {"type": "integer"}, {"type": "string"}
TOOLS = [
    function("special", arg1=INTEGER),
    function("special_2", arg1=INTEGER, arg2=INTEGER),
    function("python", code=STRING),
    function("get_time", city=STRING),
    function("get_weather", city=STRING),
    function("amount", orig={"type": "number"}),
    function("toggle", enabled={"type": "boolean"}),
    function("nullable", value={"type": ["string", "null"]}),
    function("todo", todos={"type": "array", "items": {}}),
    function("config", config={"type": "object"}),
    function("edit", filename=STRING, old=STRING, new=STRING),
    function("nothing"),
]

HELLO = "Hello, world!\nWhat's up?"
ONE = [("special", {"arg1": 1})]
TWO = [*ONE, ("special_2", {"arg1": 1, "arg2": 2})]
PARIS = [("get_time", {"city": "Paris"})]


class Case(NamedTuple):
    template: str
    output: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = []
    prompt_end: str = ""


OPEN = "<|im_start|>assistant\n<think>\n"
CODER, HERMES = "Qwen3-Coder", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"
GEMMA, GPT, LFM = "google-gemma-4-31B-it", "openai-gpt-oss-120b", "LFM2-8B-A1B"
GRANITE = "ibm-granite-granite-3.3-2B-Instruct"
KIMI, R7B = "Kimi-K2-Thinking", "CohereForAI-c4ai-command-r7b-12-2024-tool_use"
TAG = "<function=special>\n<parameter=arg1>\n1\n</parameter>\n</function>\n</tool_call>"
TAG_2 = (
    "<tool_call>\n<function=special_2>\n<parameter=arg1>\n1\n</parameter>\n"
    "<parameter=arg2>\n2\n</parameter>\n</function>\n</tool_call>"
)
FUNCTIONARY = "meetkai-functionary-medium-v3.2"
KIMI_CALL = "<|tool_call_begin|>functions.special:0<|tool_call_argument_begin|>"

CASES = [
    Case(HERMES, HELLO, HELLO),
    Case(
        HERMES,
        f'{HELLO}\n<tool_call>\n{{"name": "special", "arguments": {{"arg1": 1}}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"arg1": 1, "arg2": 2}, "name": "special_2"}\n</tool_call>',
        HELLO,
        calls=TWO,
    ),
    Case(
        "MiniMax-M1",
        '<tool_calls>\n{"name": "special", "arguments": {"arg1": 1}}\n'
        '{"name": "special_2", "arguments": {"arg1": 1, "arg2": 2}}\n</tool_calls>',
        calls=TWO,
    ),
    Case(
        "Qwen-QwQ-32B",
        "Hm.\n</think>\nThe answer is 42.",
        "The answer is 42.",
        "Hm.",
        prompt_end=OPEN,
    ),
    Case(
        "Qwen3.5-4B", f"I'm\nthinking\n</think>\n\n{HELLO}", HELLO, "I'm\nthinking", prompt_end=OPEN
    ),
    Case("Qwen-Qwen3-0.6B", f"<think>\nI'm\nthinking\n</think>\n\n{HELLO}", HELLO, "I'm\nthinking"),
    Case("Qwen3.5-4B", "still thinking", "", "still thinking", prompt_end=OPEN),
    Case(GRANITE, f"<think>Hm.</think>\n<response>\n{HELLO}\n</response>\n", HELLO, "Hm."),
    Case(GRANITE, "<think>Hm.</think><response>Cut </respons", "Cut </respons", "Hm."),
    Case(
        GRANITE,
        "<think>Hm.</think><response>a <response> b\n</response>\n c</response>",
        "a <response> b\n</response>\n c",
        "Hm.",
    ),
    Case(GRANITE, "<response>Hi</response>", "<response>Hi</response>"),
    Case(CODER, TAG, calls=ONE),
    Case(CODER, f"Let me call it.\n{TAG}", "Let me call it.", calls=ONE),
    Case(CODER, f"{TAG}\n{TAG_2}", calls=TWO),
    Case(FUNCTIONARY, f"all\n{HELLO}", HELLO, prompt_end=">>>"),
    Case(
        FUNCTIONARY,
        "python\n>>> print(1)\n",
        calls=[("python", {"code": ">>> print(1)\n"})],
        prompt_end=">>>",
    ),
    Case(FUNCTIONARY, "all\nIn Python:\n>>> 1 >> 2", "In Python:\n>>> 1 >> 2", prompt_end=">>>"),
    Case(FUNCTIONARY, "nobody\n{}", "nobody\n{}", prompt_end=">>>"),
    Case(FUNCTIONARY, HELLO, HELLO),
    Case(
        "mistralai-Ministral-3-14B-Reasoning-2512",
        f"[THINK]I'm\nthinking[/THINK]{HELLO}",
        HELLO,
        "I'm\nthinking",
    ),
    Case(
        "meta-llama-Llama-3.2-3B-Instruct",
        '<|python_tag|>{"name": "special", "parameters": {"arg1": 1}}; '
        '{"name": "special_2", "parameters": {"arg1": 1, "arg2": 2}}',
        calls=TWO,
    ),
    Case(
        "deepseek-ai-DeepSeek-V3.1",
        "REASONING</think>CONTENT<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "CONTENT",
        "REASONING",
        PARIS,
        "<｜Assistant｜><think>",
    ),
    Case(
        "deepseek-ai-DeepSeek-V3.2",
        'Calling</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_time">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="amount">\n'
        '<｜DSML｜parameter name="orig" string="false">3.14</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        reasoning="Calling",
        calls=[*PARIS, ("amount", {"orig": 3.14})],
        prompt_end="<｜Assistant｜><think>",
    ),
    Case(KIMI, f'{KIMI_CALL}{{"arg1": 1}}', calls=ONE),
    Case(GEMMA, f"<|channel>thought\nI'm\nthinking<channel|>{HELLO}", HELLO, "I'm\nthinking"),
    Case(GEMMA, f"<|channel>thought<channel|>{HELLO}", HELLO),
    Case(GEMMA, f"<|channel>thought\n<channel|>{HELLO}<|channel>thought\n<channel|>", HELLO),
    Case(
        GEMMA,
        f'{HELLO}<|tool_call>call:get_time{{city:<|"|>Paris<|"|>}}<tool_call|>'
        '<|tool_call>call:config{config:{theme:<|"|>dark<|"|>,count:-3,on:true}}<tool_call|>',
        HELLO,
        calls=[*PARIS, ("config", {"config": {"theme": "dark", "count": -3, "on": True}})],
    ),
    Case(
        GEMMA,
        '<|tool_call>call:todo{todos:[<|"|>buy milk<|"|>,<|"|>walk {dog}<|"|>]}<tool_call|>'
        "<|tool_call>call:nothing{}<tool_call|><|tool_call>call:amount{orig:1.5e10}<tool_call|>",
        calls=[
            ("todo", {"todos": ["buy milk", "walk {dog}"]}),
            ("nothing", {}),
            ("amount", {"orig": 1.5e10}),
        ],
    ),
    Case(GPT, f"<|channel|>final<|message|>{HELLO}", HELLO),
    Case(
        GPT,
        "<|channel|>analysis<|message|>I'm\nthinking<|end|><|start|>assistant<|channel|>final"
        f"<|message|>{HELLO}",
        HELLO,
        "I'm\nthinking",
    ),
    Case(
        GPT,
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.special <|constrain|>json<|message|>{"arg1": 1}<|call|>',
        reasoning="Hm",
        calls=ONE,
    ),
    Case(
        GPT,
        ' to=functions.special<|channel|>analysis<|message|>{"arg1": 1}',
        calls=ONE,
        prompt_end="<|start|>assistant",
    ),
    Case(LFM, "<|tool_call_start|>[special(arg1=1)]<|tool_call_end|>", calls=ONE),
    Case(
        LFM,
        'Let me see.<|tool_call_start|>[config(config={"enabled": True, "note": null}), '
        "python(code='a\\nb')]<|tool_call_end|>",
        "Let me see.",
        calls=[
            ("config", {"config": {"enabled": True, "note": None}}),
            ("python", {"code": "a\nb"}),
        ],
    ),
    Case(LFM, "Use this: [link](url).", "Use this: [link](url)."),
    Case(R7B, f"<|START_RESPONSE|>{HELLO}<|END_RESPONSE|>", HELLO),
    Case(
        "NVIDIA-Nemotron-Nano-v2",
        'Hm\n</think>\n<TOOLCALL>[{"name": "special", "arguments": {"arg1": 1}}]</TOOLCALL>',
        reasoning="Hm",
        calls=ONE,
        prompt_end="<think>\n",
    ),
    Case(
        "openbmb-MiniCPM5-1B",
        '<function name="python"><param name="code"><![CDATA[a </param> b]]></param></function>',
        calls=[("python", {"code": "a </param> b"})],
    ),
]
