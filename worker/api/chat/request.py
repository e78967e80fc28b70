"""What a request to generate asks for, whichever dialect asked: a closed set of frozen records.

A dialect's `read` makes them of its body. Nothing behind them sees a body; JSON schemas, template
variables and the arguments of calls are data and stay dicts. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.api.http.adapters import Asked
from worker.wire.sampling import Sampling
from worker.wire.work import LineLimits, Medium, Prompt

Content = tuple[str | Medium, ...]
"""Of a message: texts, pictures and sounds. None of the texts is empty."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an earlier answer made."""

    name: str
    arguments: str | Mapping[str, Any] = ""
    """As the client sent them: an object, or a text that should be one in JSON."""
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a chat. What is `None` or empty was not sent."""

    role: str
    content: Content | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """The call that this message is the result of."""
    name: str | None = None


INPUT = "input"
"""The one argument of a custom tool, and in a conversation of its call."""


Syntax = Literal["lark", "regex"]


@dataclass(frozen=True, slots=True)
class TextForm:
    """The form of a custom tool's text."""

    syntax: Syntax
    definition: str
    path: str
    """In the request, for faults."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    """By which the model is told of it."""
    path: str
    """Of its parameters in the request, for faults."""
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """A JSON schema; without one, any object is allowed."""
    is_custom: bool = False
    """Whether the client knows it as a tool that takes a text, which is the argument `INPUT`."""
    form: TextForm | None = None
    """Of the text of a custom tool; `None` is any text."""
    within: tuple[str, str] | None = None
    """The namespace that the client has it in, and its name there."""

    @property
    def name_path(self) -> str:
        """Of its name in the request, for faults."""
        return f"{self.path.rpartition('.')[0]}.name"


# --- the form of an answer; each has the path of the request's field, for faults -------------


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that is valid under a schema."""

    schema: object
    path: str
    strict: bool = False
    """Whether a schema that cannot be enforced whole is refused."""
    calls: tuple[str, ...] = ()
    """Functions of which one may be called instead, as `{"name", "arguments"}`."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A text that the regular expression matches as a whole."""

    pattern: str
    path: str


@dataclass(frozen=True, slots=True)
class Choices:
    """One of the texts."""

    texts: tuple[str, ...]
    path: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """A text that follows a grammar: GBNF as llama.cpp reads it, or Lark as llguidance does."""

    text: str
    path: str


Format = JsonSchema | Expression | Choices | Grammar


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """An answer that is one call, `{"name", "arguments"}`, or a list of one or more."""

    tools: tuple[Tool, ...]
    """Those that may be called."""
    several: bool = False


@dataclass(frozen=True, slots=True)
class OneTool:
    """The choice of the one function that must be called."""

    name: str
    """By which the model is told of it."""
    path: str
    """Of its name in the request, for faults."""


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """What is asked of the model's reasoning; `None` leaves it to the worker's settings."""

    budget: int | None = None
    """Tokens of it at most; -1 is any number."""
    message: str | None = None
    """Ends a block whose budget is spent."""
    effort: str | None = None
    """`none`, `low`, `high` or another word that the model's template knows."""
    enabled: bool | None = None
    splits: bool | None = None
    """Whether it comes apart from the answer's text."""


UNASKED = ReasoningOptions()


@dataclass(frozen=True, slots=True)
class Chat:
    """The input of the model's chat template, and how tools may be used."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "none", "required"] | OneTool = "auto"
    parallel_tool_calls: bool | None = None
    """False: one call at most. True: also a required call may be several."""
    opens_answer: bool = True
    """Whether the template begins the answer's message (`add_generation_prompt`), unless it
    continues one."""
    continues: bool | Literal["content", "reasoning_content"] = False
    """Whether the answer goes on where the last message ends: its text, or its reasoning if it has
    nothing else. A word says which of the two."""
    reasoning: ReasoningOptions = UNASKED
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Those that the request names itself."""
    path: str = "messages"
    """Of the messages in the request, for faults."""


@dataclass(frozen=True, slots=True)
class Generate:
    """One request: `n` choices for each of its prompts, or for its chat."""

    id: str
    """Names the answer, and the job of its first choice."""
    input: Chat | tuple[Prompt, ...]
    sampling: Sampling
    """The constraint in it follows from `format`."""
    model: str | None = None
    max_tokens: int | None = None
    """`None` is all that the context leaves; more than that is cut to it."""
    formats: tuple[Format, ...] = ()
    """Of the answer's text. The first counts, unless a call is forced, which has a form of its own;
    the answer's head names the others."""
    stop: tuple[str, ...] = ()
    lines: LineLimits = LineLimits()
    reasoning: ReasoningOptions = UNASKED
    """Of raw prompts; a chat has its own."""
    n: int = 1
    prompt_logprobs: int | None = None
    """The number of alternatives for each token of the prompt; `None` disables them."""
    scores_end: bool = False
    """Whether log-probabilities, where they are wanted, have that of the token that ends it."""
    echo: bool = False
    """Whether the answer begins with the prompt; if it has log-probabilities, with the prompt's."""
    streams: bool = False
    reports_progress: bool = False
    """Whether a stream tells how far the prompt is, or what time it has taken."""
    adapters: Sequence[Asked] | None = None
    """LoRA adapters that it lists; `None` leaves them to `model`."""
    salt: str | None = None
    """Prompt prefixes are reused only under the same one."""
    deterministic: bool = False
    """Alone in its batch, nothing reused."""
    ignored: tuple[str, ...] = ()
    """Fields that are known and have no effect here; the answer's head names them."""
