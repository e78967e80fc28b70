"""What a request to generate asks for, in any dialect: a closed set of frozen records.

A dialect's `read` makes them from its body, which the rest of `chat/` does not read. JSON schemas,
template variables and the arguments of calls are data and stay dicts. Any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.api.http.adapters import Asked
from worker.wire.sampling import Sampling
from worker.wire.work import LineLimits, Medium, Prompt

Content = tuple[str | Medium, ...]
"""A message's texts, pictures and sounds. None of the texts is empty."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an earlier answer made."""

    name: str
    arguments: str | Mapping[str, Any] = ""
    """As the client sent them: an object, or a text that should be a JSON object."""
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A turn of a chat. A field that was not sent is `None` or empty."""

    role: str
    content: Content | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """The id of the call that this message is the result of."""
    name: str | None = None


INPUT = "input"
"""The name of a custom tool's only parameter, and of the argument in its calls."""

Syntax = Literal["lark", "regex"]


@dataclass(frozen=True, slots=True)
class TextForm:
    """The form that a custom tool's text must have."""

    syntax: Syntax
    definition: str
    path: str
    """Its path in the request, for faults."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    """The name by which the model knows it."""
    path: str
    """The path of its parameters in the request, for faults."""
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """A JSON schema; without one, any object is allowed."""
    is_custom: bool = False
    """Whether the client defined it as a tool that takes a text, which is the argument `INPUT`."""
    form: TextForm | None = None
    """The form of a custom tool's text; `None` allows any."""
    within: tuple[str, str] | None = None
    """The namespace in which the client defined it, and its name there."""

    @property
    def name_path(self) -> str:
        """The path of its name in the request, for faults."""
        return f"{self.path.rpartition('.')[0]}.name"


_NOUNS = {"lark": "Lark grammar", "regex": "regular expression"}
_PARAMETERS = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The text, and nothing else."}},
    "required": [INPUT],
    "additionalProperties": False,
}


def custom_tool(name: str, description: str | None, path: str, form: TextForm | None) -> Tool:
    """The custom tool that the request defines at `path`; without a form, it takes any text.

    Chat templates only know functions. So the model sees a function with one parameter, `INPUT`,
    and the client gets that argument as the tool's text. A call in JSON that a grammar covers,
    which is a forced one or one beside a schema, is held to the form; for any other call the
    function's description only states it.
    """
    parts = [description or ""]
    if form is not None:
        parts.append(f"Its `{INPUT}` follows this {_NOUNS[form.syntax]}:\n{form.definition}")
    text = "\n\n".join(filter(None, parts)) or None
    return Tool(name, f"{path}.{INPUT}", text, _PARAMETERS, is_custom=True, form=form)


# --- the form of an answer; each has the path of the request's field, for faults -------------


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that is valid under a schema."""

    schema: object
    path: str
    strict: bool = False
    """Whether a schema that cannot be enforced whole is refused."""
    calls: tuple[Tool, ...] = ()
    """Tools, one of which may be called instead, as `{"name", "arguments"}`."""


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
    """A `tool_choice` that names the function to call."""

    name: str
    """The name by which the model knows it."""
    path: str
    """The path of the name in the request, for faults."""


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """How the model is to reason; `None` leaves a choice to the worker's settings."""

    budget: int | None = None
    """The most tokens of reasoning; -1 is unlimited."""
    message: str | None = None
    """The text that ends a reasoning block whose budget is spent."""
    effort: str | None = None
    """`none`, `low`, `high` or another word that the model's template knows."""
    enabled: bool | None = None
    splits: bool | None = None
    """Whether reasoning is separated from the answer's text."""


UNASKED = ReasoningOptions()


@dataclass(frozen=True, slots=True)
class Chat:
    """The input of the model's chat template, and how tools may be used."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: Literal["auto", "none", "required"] | OneTool = "auto"
    parallel_tool_calls: bool | None = None
    """False: at most one call. True: several, even if a call is required."""
    opens_answer: bool = True
    """Whether the template opens the answer's message (`add_generation_prompt`). An answer that
    continues a message needs no other."""
    continues: bool | Literal["content", "reasoning_content"] = False
    """Whether the answer continues the last message: its text, or its reasoning if it has no text.
    A word says which of the two."""
    reasoning: ReasoningOptions = UNASKED
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """The variables that the request itself sets."""
    path: str = "messages"
    """The path of the messages in the request, for faults."""


@dataclass(frozen=True, slots=True)
class Generate:
    """One request: `n` choices for each of its prompts, or for its chat."""

    id: str
    """The id of the answer, and of its first choice's job."""
    input: Chat | tuple[Prompt, ...]
    sampling: Sampling
    """Without a constraint: `inference_of` adds that of `formats` or of a forced call."""
    model: str | None = None
    max_tokens: int | None = None
    """`None` means all that the context leaves; more than that is cut to it."""
    formats: tuple[Format, ...] = ()
    """Forms of the answer's text. The first is enforced, unless a call is forced, which has a form
    of its own. A header of the answer names the others."""
    stop: tuple[str, ...] = ()
    lines: LineLimits = LineLimits()
    reasoning: ReasoningOptions = UNASKED
    """For raw prompts; a chat has its own."""
    n: int = 1
    prompt_logprobs: int | None = None
    """The number of alternatives for each token of the prompt; `None` disables them."""
    scores_end: bool = False
    """Whether log-probabilities, if asked for, include that of the token that ends the answer."""
    echo: bool = False
    """Whether the answer begins with the prompt, and its log-probabilities with the prompt's."""
    streams: bool = False
    reports_progress: bool = False
    """Whether a stream reports how far the prompt is computed, and how long that has taken."""
    adapters: Sequence[Asked] | None = None
    """The LoRA adapters that the request lists; `None`: those of `model`."""
    salt: str | None = None
    """Prompt prefixes are reused only between requests with the same salt."""
    deterministic: bool = False
    """Whether it is alone in its batch and reuses nothing."""
    ignored: tuple[str, ...] = ()
    """Known fields that have no effect here; a header of the answer names them."""
