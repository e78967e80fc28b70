"""Agents: conversations of ten turns with tools, as many at a time as there are slots, or more.

Each turn sends all that was said before, the model's own words included, as agents do; so what
counts is how much of a conversation a server has not to compute again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tools.bench.client import Body, Recording, Request
from tools.bench.errors import BenchError
from tools.bench.loads import Flavour, Load, Metrics, Prompt, read_throughput, text_of
from tools.bench.model import BIG_VOCABULARY, MEMORY_KINDS
from tools.bench.servers import Shape
from tools.bench.stats import percentile
from tools.bench.streams import TokenStream, token_stream

TURNS = 10
WORDS_A_TURN, TOKENS_A_TURN = 40, 32
SHAPE = Shape(slots=8, context_per_slot=4096)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name.replace('_', ' ')} and get the result as text.",
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"} for argument in arguments},
                "required": list(arguments),
            },
        },
    }
    for name, arguments in {
        "read_file": ("path",),
        "write_file": ("path", "content"),
        "run_command": ("command", "folder"),
    }.items()
]


def talking(n_conversations: int) -> Callable[[random.Random, Sequence[str]], list[Prompt]]:
    """The user's words, turn by turn: conversation c, turn t is number c * TURNS + t."""

    def make(rng: random.Random, words: Sequence[str]) -> list[Prompt]:
        count = n_conversations * TURNS
        return [Prompt(text_of(rng, words, WORDS_A_TURN), TOKENS_A_TURN) for _ in range(count)]

    return make


def requests_of(
    prompts: list[Prompt], flavour: Flavour, model_id: str, sampling: dict[str, Any], tag: str
) -> list[Request]:
    if flavour != "completions":
        raise BenchError("Agents speak OpenAI's dialect alone.")
    requests = []
    for index in range(len(prompts)):
        first = index - index % TURNS
        body = _Turn(prompts, first, index, {"model": model_id, **sampling})
        after = index - 1 if index > first else None
        requests.append(Request("/v1/chat/completions", body, after_end=after))
    return requests


class _Turn:
    """Makes the body of one turn when the turn before has been answered."""

    def __init__(
        self, prompts: list[Prompt], first: int, index: int, fields: dict[str, Any]
    ) -> None:
        self.prompts = prompts
        self.first = first
        self.index = index
        self.fields = fields

    def __call__(self, recordings: Sequence[Recording]) -> Body:
        messages = [{"role": "system", "content": "You help with the files of a project."}]
        for turn in range(self.first, self.index):
            messages.append({"role": "user", "content": self.prompts[turn].text})
            messages.append({"role": "assistant", "content": token_stream(recordings[turn]).text})
        messages.append({"role": "user", "content": self.prompts[self.index].text})
        return {
            **self.fields,
            "messages": messages,
            "tools": TOOLS,
            "max_tokens": self.prompts[self.index].n_out,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def read_turns(streams: list[TokenStream], prompts: list[Prompt]) -> Metrics:
    later = [stream for index, stream in enumerate(streams) if index % TURNS]
    return read_throughput(streams, prompts) | {
        "later_ttft_p50_ms": percentile([stream.ttft_s for stream in later], 50) * 1e3,
        "prefix_hit_rate": sum(stream.n_cached for stream in later)
        / max(sum(stream.n_prompt for stream in later), 1),
    }


LOADS = {
    name: Load(
        name,
        SHAPE,
        talking(n),
        read_turns,
        900,
        model=model,
        requests_of=requests_of,
        divisible=True,
    )
    for name, n, model in (
        ("agents", SHAPE.slots, BIG_VOCABULARY),
        ("agents20", 20, "dense"),
        *((f"agents-{kind}", SHAPE.slots, kind) for kind in MEMORY_KINDS),
    )
}
"""`agents20` has more conversations than slots; those behind it are on each kind of memory."""
