"""Agents: conversations of several turns with tools, as many at a time as there are slots, or more.

Like agents, each turn sends the whole conversation, including the model's own words; so the result
depends on how much of a conversation a server need not compute again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tools.bench.client import Body, Recording, Request
from tools.bench.loads import Load, Metrics, Prompt, by_name, read_throughput, text_of
from tools.bench.model import BIG_VOCABULARY, INSTRUCT, MEMORY_KINDS
from tools.bench.servers import Shape
from tools.bench.stats import percentile
from tools.bench.streams import TokenStream, token_stream

TOKENS_A_TURN = 32
LONG_AT_S = 10.0
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


@dataclass(frozen=True, slots=True)
class Talk:
    """Conversations that begin at once. Conversation c, turn t is prompt c * `n_turns` + t."""

    n_conversations: int
    n_turns: int = 10
    n_first_words: int = 40
    n_words: int = 40
    n_long_words: int = 0
    """Words of an additional prompt, sent `LONG_AT_S` after the others have begun; 0 for none."""

    def make(self, rng: random.Random, words: Sequence[str]) -> list[Prompt]:
        """Return the users' words, turn by turn."""
        counts = [self.n_first_words, *[self.n_words] * (self.n_turns - 1)] * self.n_conversations
        prompts = [Prompt(text_of(rng, words, count), TOKENS_A_TURN) for count in counts]
        if self.n_long_words:
            text = text_of(rng, words, self.n_long_words)
            prompts.append(Prompt(text, TOKENS_A_TURN, at_s=LONG_AT_S))
        return prompts

    def requests_of(
        self, prompts: list[Prompt], model_id: str, sampling: dict[str, Any]
    ) -> list[Request]:
        requests = []
        for index, prompt in enumerate(prompts):
            first = index - index % self.n_turns
            body = _Turn(prompts, first, index, {"model": model_id, **sampling})
            after = index - 1 if index > first else None
            requests.append(
                Request("/v1/chat/completions", body, at_s=prompt.at_s, after_end=after)
            )
        return requests

    def read(self, streams: list[TokenStream], prompts: list[Prompt]) -> Metrics:
        later = [stream for index, stream in enumerate(streams) if index % self.n_turns]
        return read_throughput(streams, prompts) | {
            "later_ttft_p50_ms": percentile([stream.ttft_s for stream in later], 50) * 1e3,
            "prefix_hit_rate": sum(stream.n_cached for stream in later)
            / max(sum(stream.n_prompt for stream in later), 1),
        }


class _Turn:
    """Makes the body of one turn once the previous turn has been answered."""

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


def _load(name: str, talk: Talk, shape: Shape | None, model: str) -> Load:
    return Load(
        name,
        shape,
        talk.make,
        talk.read,
        900,
        model=model,
        requests_of=talk.requests_of,
        divisible=True,
    )


_OF_EIGHT_HUNDRED = Talk(6, n_turns=5, n_first_words=800, n_words=120)
LOADS = by_name(
    _load("agents", Talk(SHAPE.slots), SHAPE, BIG_VOCABULARY),
    _load("agents20", Talk(20), SHAPE, "dense"),
    *(_load(f"agents-{kind}", Talk(SHAPE.slots), SHAPE, kind) for kind in MEMORY_KINDS),
    _load("agents6", _OF_EIGHT_HUNDRED, None, INSTRUCT),
    _load("agents6-long", replace(_OF_EIGHT_HUNDRED, n_long_words=5400), None, INSTRUCT),
)
"""`agents20` has more conversations than slots; the ones after it cover each kind of memory.

`agents6` runs SmolLM2 on defaults: 800 words each at the beginning and four turns of 120;
`agents6-long` adds a prompt of some 6,000 tokens."""
