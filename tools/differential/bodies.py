"""Random requests: common and unusual fields of each path, greedy. Pure functions.

The same seeds make the same requests. The fields have the form that clients send, including nulls
and empty lists, and occasionally a value that no server should accept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from random import Random
from typing import Any

from tools.differential.asking import Asked

TEXTS = (
    "Once upon a time", "The fox", "What is 3 plus 4?", "Ünïcode: 媽 🤗", " leading blank",
    "a\nb\n\nc", "<|im_start|>user\nHi<|im_end|>\n", "The capital of France is", "1, 2, 3, 4",
)  # fmt: skip
_Fields = Mapping[str, Sequence[Any]]

SAMPLING: _Fields = {
    "top_k": (0, 1, 40, None, -1),
    "top_p": (0.1, 0.95, 1, 1.0, None),
    "min_p": (0, 0.05, 0.5),
    "typical_p": (0.2, 1),
    "top_n_sigma": (-1, 1.0),
    "repeat_penalty": (1.0, 1.3, 1.8),
    "repeat_last_n": (0, 4, 64),
    "presence_penalty": (0, 0.7, -0.5),
    "frequency_penalty": (0, 0.7, -0.5),
    "dry_multiplier": (0, 0.8, 2.0),
    "dry_base": (1.75, 1.1),
    "dry_allowed_length": (1, 2),
    "dry_penalty_last_n": (0, 64, 16),
    "dry_sequence_breakers": (["\n"], [".", " the"]),
    "xtc_probability": (0,),
    "mirostat": (0,),
    "mirostat_tau": (5.0,),
    "dynatemp_range": (0,),
    "min_keep": (0, 3),
    "samplers": (["top_k", "temperature"], ["penalties", "dry", "temperature"], "kt", "epdt"),
    "seed": (1, -1, 42, None),
    "logit_bias": (
        {"100": 5.0}, [[100, -5.5], [101, False]], [["fox", 3], ["12", 40]], {"fox": 2.5}, {},
        None, [],
    ),
    "ignore_eos": (True, False),
    "stop": ("the", ["the", "fox"], [], None, ["zzz"], [""], "."),
}  # fmt: skip
RUNNING: _Fields = {
    "cache_prompt": (True, False),
    "timings_per_token": (True, False),
    "return_progress": (True, False),
    "n_keep": (0, -1),
    "n_discard": (0,),
    "id_slot": (-1,),
    "lora": ([],),
    "sse_ping_interval": (30,),
    "speculative.n_max": (4,),
    "user": ("somebody", ""),
}
OPENAI: _Fields = {
    "model": ("any", None),
    "n": (1, 2),
    "stream_options": ({"include_usage": True}, {"include_usage": False}, None),
    "max_completion_tokens": (7,),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto",),
}


DRAWING: _Fields = {
    **SAMPLING,
    "temperature": (0.1, 0.7, 1.0, 1.7, 5),
    "dynatemp_range": (0, 0.3, 2),
    "dynatemp_exponent": (0.4, 1.0, 2),
    "top_n_sigma": (-1, 0.5, 1.0, 2),
    "typical_p": (0.2, 0.9, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0.01, 0.1, 0.3, 0.6),
    "mirostat": (0, 0, 1, 2),
    "mirostat_tau": (1.0, 5.0),
    "adaptive_target": (-1, 0.1, 0.5),
    "samplers": (
        *SAMPLING["samplers"], ["temperature", "min_p", "top_k"], "tpkxy", "kdey", ["xtc"] * 2, [],
    ),
}  # fmt: skip
"""Fields for one token with all probabilities, which are the same on both servers whatever each
draws."""


def drawn(rng: Random, least: int, *pools: _Fields) -> dict[str, Any]:
    """Draw some fields of these pools, often only a few.

    Penalties come with the number of tokens to count: without it, llama-server counts the last 64
    tokens, and the worker those of the answer, like OpenAI.
    """
    fields = {name: values for pool in pools for name, values in pool.items()}
    n_fields = min(len(fields), rng.choice((least, least + 1, least + 3, least + 8)))
    found = {name: rng.choice(fields[name]) for name in rng.sample(sorted(fields), n_fields)}
    if not {"presence_penalty", "frequency_penalty"}.isdisjoint(found):
        found.setdefault("repeat_last_n", rng.choice(fields["repeat_last_n"]))
    return found


# --- forms of answers ---

WORDS = ("yes", "no ", "fox", " the", '"', "é", "\\", "\n", "1", ".")
SETS = ("[a-z]", "[0-9_]", "[A-Za-z ]", '[^"\\n]', "[.,!-]")
TIMES = ("", "", "?", "{2}", "{1,3}", "{0,4}")
ENOUGH = 400
"""Tokens for the longest text of a constraint, because a cut text cannot be compared."""


def grammar(rng: Random) -> str:
    """Make a GBNF grammar of bounded texts; its last line has an equivalent regular expression."""
    rules: list[str] = []

    def part(depth: int) -> tuple[str, str]:
        kind = rng.choice(("word", "set", "rule", "several", "either")[: 5 if depth else 2])
        if kind == "word":
            word = rng.choice(WORDS)
            return json.dumps(word, ensure_ascii=False), re.escape(word).replace("\n", "n")
        if kind == "set":
            chars, times = rng.choice(SETS), rng.choice(TIMES)
            return chars + times, chars + times
        inside = [part(depth - 1) for _ in range(rng.choice((2, 3)))]
        written, expressions = zip(*inside, strict=True)
        if kind == "several":
            times = rng.choice(TIMES)
            return f"({' '.join(written)}){times}", f"(?:{''.join(expressions)}){times}"
        if kind == "rule":
            rules.append(f"r{len(rules)} ::= {' '.join(written)}")
            return rules[-1].split()[0], "".join(expressions)
        return f"({' | '.join(written)})", f"(?:{'|'.join(expressions)})"

    written, expressions = zip(*(part(2) for _ in range(2)), strict=True)
    return "\n".join((f"root ::= {' '.join(written)}", *rules, f"# {''.join(expressions)}", ""))


def schema(rng: Random, depth: int = 2) -> dict[str, Any]:
    """Make a schema whose texts are bounded."""
    small: Sequence[dict[str, Any]] = (
        {"type": "string", "maxLength": rng.choice((1, 8))},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"type": "string", "format": "date"},
        {"type": "integer"},
        {"type": "integer", "minimum": -3, "maximum": 120},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["fox", "bird", 7, None]},
        {"const": "é"},
    )
    kind = rng.choice(("small", "object", "array", "either")) if depth else "small"
    if kind == "object":
        return object_schema(rng, depth)
    if kind == "array":
        most = rng.choice((1, 3))
        return {"type": "array", "items": schema(rng, depth - 1), "minItems": 1, "maxItems": most}
    if kind == "either":
        return {"anyOf": [schema(rng, depth - 1) for _ in range(2)]}
    return rng.choice(small)


def object_schema(rng: Random, depth: int = 2) -> dict[str, Any]:
    names = rng.sample(("name", "age", "a b", "ü"), rng.choice((1, 2, 3)))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth - 1) for name in names},
        "required": names[: rng.choice((0, len(names)))],
        "additionalProperties": False,
    }


def tools(rng: Random, schema_field: str = "parameters") -> list[dict[str, Any]]:
    names = rng.sample(("weather", "add", "get-time"), rng.choice((1, 1, 2)))
    return [
        {"name": name, "description": f"It does {name}", schema_field: object_schema(rng, 1)}
        for name in names
    ]


def formed(rng: Random, most: str, *others: Mapping[str, Any]) -> dict[str, Any]:
    """Occasionally add a grammar, a schema or one of the `others`, with enough tokens for its texts
    in the field `most` and without fields that would cut them."""
    forms: Sequence[Mapping[str, Any]] = (
        {"grammar": grammar(rng)}, {"json_schema": schema(rng)}, *others,
    )  # fmt: skip
    if rng.random() < 0.6:
        return {most: rng.choice((1, 6, 12)), **rng.choice(({}, {}, {"grammar": ""}))}
    both: Mapping[str, Any] = rng.choice(forms) if rng.random() < 0.1 else {}
    whole = {most: ENOUGH, "max_completion_tokens": ENOUGH, "stop": []}
    return {**whole, **both, **rng.choice(forms)}


# --- requests that generate ---


REPEATING = (
    "a b c a b c a b", "The fox, the fox, the fox: the", "1, 2, 3\n1, 2, 3\n1, 2", "What is 3 plus",
)  # fmt: skip


def one_draw(rng: Random) -> dict[str, Any]:
    return {
        "prompt": rng.choice(REPEATING),
        **drawn(rng, 1, DRAWING),
        "n_predict": 1,
        "n_probs": 20,
        "post_sampling_probs": True,
        "response_fields": ["completion_probabilities"],
    }


def completion(rng: Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return one_draw(rng)
    prompts: Sequence[Any] = (
        *TEXTS, [0, 100, 101, 102], ["Once upon a time", "The fox"], [[0, 100], [0, 101, 102]],
        [100, "The fox", 101], ["The fox", [0, 100, 101]], [12, "a"],
        {"prompt_string": "The fox"},
    )  # fmt: skip
    return {
        "prompt": rng.choice(prompts),
        "temperature": 0,
        **drawn(rng, 0, SAMPLING, RUNNING),
        **formed(rng, "n_predict"),
        **drawn(
            rng, 0, {
                "n_probs": (0, 1, 3, None),
                "post_sampling_probs": (True, False),
                "return_tokens": (True, False),
                "n_indent": (0,),
                "t_max_predict_ms": (0, 60_000),
                "response_fields": (["content", "generation_settings/n_predict"], []),
                "stream": (True, False),
                "n_cmpl": (1, 2),
            },
        ),
    }  # fmt: skip


def infill(rng: Random) -> dict[str, Any]:
    return {
        "input_prefix": rng.choice(TEXTS),
        "input_suffix": rng.choice(TEXTS),
        "n_predict": rng.choice((1, 6)),
        "temperature": 0,
        **drawn(
            rng, 0, SAMPLING, RUNNING, {
                "prompt": TEXTS,
                "stream": (True, False),
                "input_extra": ([], [{"filename": "a.py", "text": "a = 1\n"}], [{"text": "x"}]),
            },
        ),
    }  # fmt: skip


def openai_completion(rng: Random) -> dict[str, Any]:
    return {
        "prompt": rng.choice((*TEXTS, [0, 100, 101], ["The fox", "Once"])),
        "temperature": 0,
        **drawn(rng, 0, SAMPLING, RUNNING, OPENAI),
        **formed(rng, "max_tokens"),
        **drawn(rng, 0, {"stream": (True, False), "logprobs": (1, 3, None)}),
    }


def message(rng: Random, role: str = "user") -> dict[str, Any]:
    text = rng.choice(TEXTS)
    parts = [{"type": "text", "text": text}, {"type": "text", "text": "And you?"}]
    return {"role": role, "content": rng.choice((text, text, parts))}


def messages(rng: Random) -> list[dict[str, Any]]:
    found = [message(rng)]
    if rng.random() < 0.4:
        found += [message(rng, "assistant"), message(rng)]
    if rng.random() < 0.3:
        found.insert(0, {"role": rng.choice(("system", "developer")), "content": "Be brief."})
    return found


CHAT: _Fields = {
    "response_format": ({"type": "text"}, None),
    "tools": ([], None),
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
    "reasoning_format": ("none", "auto", "deepseek"),
    "reasoning_effort": ("low", "none"),
    "parallel_tool_calls": (True, False),
    "thinking_budget_tokens": (0, 100),
    "return_tokens": (True, False),
}  # fmt: skip


def chat(rng: Random) -> dict[str, Any]:
    scored = rng.choice(({}, {}, {"logprobs": True, "top_logprobs": 2}, {"logprobs": False}))
    return {
        "messages": messages(rng),
        "temperature": 0,
        **drawn(rng, 0, SAMPLING, RUNNING, OPENAI, CHAT, {"stream": (True, False)}),
        **scored,
        **formed(
            rng,
            "max_tokens",
            {"response_format": {"type": "json_object", "schema": schema(rng)}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": schema(rng)},
                }
            },
            {
                "tools": [{"type": "function", "function": each} for each in tools(rng)],
                "tool_choice": rng.choice(("auto", "required", "required")),
                "parallel_tool_calls": False,
            },
        ),
    }


def responses(rng: Random) -> dict[str, Any]:
    text = rng.choice(TEXTS)
    inputs: Sequence[Any] = (
        text,
        [{"role": "user", "content": text}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}],
        [
            {"role": "user", "content": text},
            {"type": "message", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]},
            {"role": "user", "content": "Go on"},
        ],
    )  # fmt: skip
    return {
        "input": rng.choice(inputs),
        "temperature": 0,
        **drawn(
            rng, 0, {
                "instructions": ("Be brief.", None, ""),
                "stream": (True, False),
                "model": ("any", None),
                "top_p": (0.5, 1.0),
                "tools": ([], None),
                "store": (False,),
                "reasoning": ({"effort": "low"}, {}),
                "metadata": ({},),
                "parallel_tool_calls": (True,),
            },
        ),
        **rng.choice((
            {"max_output_tokens": 4}, {"max_output_tokens": 16},
            {"max_output_tokens": ENOUGH, "tool_choice": "required", "parallel_tool_calls": False,
             "tools": [{"type": "function", **each} for each in tools(rng)]},
            {"max_output_tokens": ENOUGH,
             "text": {"format": {"type": "json_schema", "name": "x", "schema": schema(rng)}}},
        )),
    }  # fmt: skip


def anthropic(rng: Random) -> dict[str, Any]:
    turns = [each for each in messages(rng) if each["role"] in ("user", "assistant")]
    return {
        "messages": turns,
        "temperature": 0,
        **drawn(
            rng, 0, {
                "model": ("any",),
                "system": ("Be brief.", [{"type": "text", "text": "Be brief."}], None),
                "stream": (True, False),
                "stop_sequences": ([], ["the"]),
                "top_k": (0, 5),
                "top_p": (0.5, 1),
                "metadata": ({"user_id": "somebody"}, {}),
                "thinking": ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}),
                "tools": ([],),
            },
        ),
        **rng.choice((
            {"max_tokens": 4}, {"max_tokens": 16},
            {"max_tokens": ENOUGH, "stop_sequences": [],
             "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
             "tools": tools(rng, "input_schema")},
        )),
    }  # fmt: skip


def counted(make: Callable[[Random], dict[str, Any]]) -> Callable[[Random], dict[str, Any]]:
    def body(rng: Random) -> dict[str, Any]:
        return {name: value for name, value in make(rng).items() if name != "stream"}

    return body


def tokenize(rng: Random) -> dict[str, Any]:
    contents = (*TEXTS, "", ["The fox", 100, "ran"], [1, 2, 3])
    flags = {name: (True, False) for name in ("add_special", "parse_special", "with_pieces")}
    return {"content": rng.choice(contents), **drawn(rng, 0, flags)}


def detokenize(rng: Random) -> dict[str, Any]:
    return {"tokens": [rng.randrange(1024) for _ in range(rng.randrange(6))]}


def apply_template(rng: Random) -> dict[str, Any]:
    pools = {name: CHAT[name] for name in ("tools", "chat_template_kwargs")}
    return {"messages": messages(rng), **drawn(rng, 0, pools)}


_OF_TEXT: dict[str, Callable[[Random], Any]] = {
    "/completion": completion,
    "/completions": completion,
    "/v1/completions": openai_completion,
    "/chat/completions": chat,
    "/v1/chat/completions": chat,
    "/v1/responses": responses,
    "/responses": responses,
    "/v1/messages": anthropic,
    "/infill": infill,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/apply-template": apply_template,
    "/v1/chat/completions/input_tokens": counted(chat),
    "/chat/completions/input_tokens": counted(chat),
    "/v1/responses/input_tokens": counted(responses),
    "/responses/input_tokens": counted(responses),
    "/v1/messages/count_tokens": counted(anthropic),
    "/v1/chat/completions/control": lambda rng: {"id": "chatcmpl-none", "action": "reasoning_end"},
    "/v1/streams/lookup": lambda rng: {"conversation_ids": ["none"]},
}


def ollama_chat(rng: Random) -> dict[str, Any]:
    return {"model": "any", "messages": messages(rng), **_ollama(rng)}


def ollama_text(rng: Random) -> dict[str, Any]:
    return {"model": "any", "prompt": rng.choice(TEXTS), **_ollama(rng)}


def _ollama(rng: Random) -> dict[str, Any]:
    options = {"temperature": 0, "num_predict": rng.choice((1, 8)), **drawn(rng, 0, SAMPLING)}
    fields = {"stream": (True, False), "format": ("json", schema(rng), ""), "think": (True, False)}
    return {"options": options, **drawn(rng, 0, fields)}


OF_THE_SDKS: Mapping[str, Callable[[Random], Any]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": openai_completion,
    "/v1/responses": responses,
    "/v1/messages": anthropic,
    "/v1/messages/count_tokens": counted(anthropic),
    "/api/chat": ollama_chat,
    "/api/generate": ollama_text,
    "/api/show": lambda rng: {"model": "any"},
}
"""Paths whose answers the SDKs' own types can parse."""
_STATES = ("/health", "/v1/health", "/props", "/slots", "/models", "/v1/models", "/lora-adapters")


def generating(rng: Random) -> Iterator[Asked]:
    for path in _STATES:
        yield Asked(path)
    for path in cycle(_OF_TEXT):
        yield Asked(path, _OF_TEXT[path](rng))


EMBEDDING: _Fields = {
    "encoding_format": ("float", "base64"),
    "model": ("any",),
    "embd_normalize": (2, -1, 0, 1),
}


def embedding(rng: Random) -> Iterator[Asked]:
    inputs = (*TEXTS, list(TEXTS[:3]), [0, 100, 101], [[0, 100]], ["The fox", [0, 100]], [7, "a"])
    for path in cycle(("/embedding", "/embeddings", "/v1/embeddings")):
        name = rng.choice(("input", "content"))
        yield Asked(path, {name: rng.choice(inputs), **drawn(rng, 0, EMBEDDING)})


RERANK: _Fields = {
    "top_n": (1, 2, 9),
    "return_text": (True, False),
    "model": ("any",),
}


def ranking(rng: Random) -> Iterator[Asked]:
    for path in cycle(("/rerank", "/v1/rerank", "/reranking", "/v1/reranking")):
        name = rng.choice(("documents", "texts"))
        documents = [rng.choice(TEXTS) for _ in range(rng.choice((1, 1, 2, 4)))]
        yield Asked(path, {"query": rng.choice(TEXTS), name: documents, **drawn(rng, 0, RERANK)})


OF_POOLING = {"mean": embedding, "last": embedding, "none": embedding, "rank": ranking}
"""The requests for a model with this pooling."""
