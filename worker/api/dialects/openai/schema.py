"""OpenAI's bodies as pydantic models, with the additional fields of llama.cpp and vLLM.

Every field here takes effect; any other field is ignored and reported by name. Pure data, any
thread.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag

from worker.api.chat.prompt import ByKind, Item, Many, TemplateBody, Text, TextOr
from worker.api.http.body import Flag, Integer, JsonObject, Number, OpenBody

MAX_CHOICES = 32
MAX_PROMPTS = 256
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 128
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions."""

TokenId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
TokenIds = Annotated[tuple[TokenId, ...], Field(fail_fast=True, min_length=1)]


def _kind_of_input(value: object) -> str:
    if isinstance(value, str):
        return "~text"
    if not isinstance(value, list | tuple) or not value:
        return "~texts"
    if isinstance(value[0], str):
        return "~texts"
    return "~many" if isinstance(value[0], list | tuple) else "~ids"


def prompts_of_at_most(most: int) -> Any:
    """A text, token ids, or a list of either."""
    many = [Field(fail_fast=True, min_length=1, max_length=most)]
    return Annotated[
        Text
        | Annotated[tuple[str, ...], *many, Tag("~texts")]
        | Annotated[TokenIds, Tag("~ids")]
        | Annotated[tuple[TokenIds, ...], *many, Tag("~many")],
        Discriminator(_kind_of_input),
    ]


Inputs = str | tuple[str, ...] | tuple[int, ...] | tuple[tuple[int, ...], ...]


def inputs_of(given: Inputs) -> list[str | tuple[int, ...]]:
    """The inputs as a list of texts or of token ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [given]
    return list(given)


Stops = Annotated[
    Text | Annotated[tuple[str, ...], Field(fail_fast=True, max_length=MAX_STOPS), Tag("~list")],
    ByKind,
]


class StreamOptions(OpenBody):
    include_usage: Flag = False


class SamplingFields(OpenBody):
    """How tokens are drawn; an absent field has the model's default."""

    temperature: Number | None = Field(None, ge=0, le=2, description="0 is greedy")
    top_p: Number | None = Field(None, ge=0, le=1, description="1 is off")
    top_k: Integer | None = Field(None, ge=-1, le=2**31 - 1, description="0 and -1 are off")
    min_p: Number | None = Field(None, ge=0, le=1, description="0 is off")
    repetition_penalty: Number | None = Field(
        None,
        ge=0,
        le=2,
        validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"),
        description="1 is off",
    )
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] = Field(
        {}, max_length=1024, description="token id, as a string, to what is added to its logit"
    )
    seed: Integer | None = Field(None, ge=-(2**63), le=2**64 - 1, description="-1 draws one")
    ignore_eos: Flag = False
    min_tokens: Integer = Field(0, ge=0, le=2**31 - 1, description="before so many nothing ends it")
    stop_token_ids: Many[TokenId] = Field(
        (), max_length=MAX_STOPS, description="they end the answer as the model's own end does"
    )


Schema = TextOr[JsonObject]


class StructuredOutputs(OpenBody):
    """vLLM's `structured_outputs`."""

    json_: Schema | None = Field(None, validation_alias="json")
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    json_object: Flag = False


class GenerationBody(SamplingFields):
    """The common fields of chat and plain completions."""

    model: str | None = Field(None, max_length=1024)
    max_tokens: Integer | None = Field(
        None,
        ge=-1,
        validation_alias=AliasChoices("max_completion_tokens", "max_tokens", "n_predict"),
        description="cut to what the context leaves; -1 is all of it",
    )
    n: Integer = Field(1, ge=1, le=MAX_CHOICES)
    stop: Stops | None = None
    stream: Flag = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = Field(None, description="prompt prefixes are reused only for the same user")
    prompt_cache_key: str | None = Field(
        None, description="prompt prefixes are reused only under the same key"
    )
    cache_salt: str | None = Field(
        None, description="prompt prefixes are reused only under the same salt"
    )
    deterministic: Flag = Field(False, description="alone in its batch, nothing reused")
    timings_per_token: Flag = Field(False, description="timings in every chunk of a stream")
    return_progress: Flag = Field(
        False, description="chunks with prompt_progress while the prompt of a stream is computed"
    )
    json_schema: JsonObject | None = None
    grammar: str | None = Field(None, description="GBNF, or Lark as llguidance reads it")
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] = ()
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        given = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return tuple(stop for stop in given if stop)

    @property
    def salt(self) -> str | None:
        names = ("prompt_cache_key", "user", "cache_salt")
        return " ".join(f"{n}={v}" for n in names if (v := getattr(self, n))) or None


ToolWord = Annotated[Literal["none", "auto", "required"], Tag("~text")]
WordOr = Annotated[ToolWord | Annotated[Item, Tag("~object")], ByKind]


class FunctionName(OpenBody):
    name: str = Field(min_length=1, max_length=256)


class FunctionChoice(OpenBody):
    type: Literal["function"] = "function"
    function: FunctionName


class JsonSchemaFormat(OpenBody):
    name: str | None = None
    schema_: JsonObject = Field(validation_alias="schema", description="a JSON schema")
    strict: Flag | None = None


class ResponseFormat(OpenBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: JsonObject | None = Field(
        None, validation_alias="schema", description="a JSON schema, as llama.cpp has it"
    )


class ChatBody(GenerationBody, TemplateBody):
    """`POST /v1/chat/completions`."""

    logprobs: Flag = False
    top_logprobs: Integer | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    tool_choice: WordOr[FunctionChoice] | None = None
    parallel_tool_calls: Flag | None = Field(
        None,
        description="false: one call at most; true: where a call is required, several may come",
    )
    modalities: tuple[Literal["text"], ...] = ()
    reasoning_effort: str | None = Field(None, description="a variable of the template")
    verbosity: str | None = Field(None, description="a variable of the template")
    enable_thinking: Flag | None = Field(None, description="a variable of the template")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        names = ("reasoning_effort", "verbosity", "enable_thinking")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return given | (self.chat_template_kwargs or {})


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: prompts_of_at_most(MAX_PROMPTS)  # type: ignore[valid-type]
    logprobs: Integer | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: Integer | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="log-probabilities of the prompt's tokens and of so many alternatives",
    )
    best_of: Literal[1] | None = None
    echo: Flag = Field(
        False, description="the answer begins with the prompt, its log-probabilities included"
    )
    suffix: str | None = Field(
        None, description="what comes after the answer; needs fill-in-the-middle tokens"
    )
