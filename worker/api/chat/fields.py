"""Fields that several dialects share, and the requests they make. Pure data, any thread.

The names are OpenAI's, with those of llama.cpp and vLLM beside them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, Field

from worker.api.chat.field_types import (
    ANY_OBJECT,
    MAX_CHOICES,
    Limit,
    ModelName,
    Schema,
    Stops,
    TextOrNumber,
)
from worker.api.chat.request import (
    UNASKED,
    Chat,
    Choices,
    Expression,
    Format,
    Generate,
    Grammar,
    JsonSchema,
    ReasoningOptions,
)
from worker.api.chat.sampling import SamplingFields
from worker.api.http.body import (
    Flag,
    Integer,
    JsonObject,
    Many,
    Number,
    OpenBody,
    Refused,
    parse_json,
)
from worker.api.http.state import AppState
from worker.wire.adapters import MOST_SCALE
from worker.wire.work import LineLimits, Prompt


class StreamOptions(OpenBody):
    include_usage: Flag = False


AdapterId = Annotated[TextOrNumber[Integer], Field(description="its index or its name")]
AdapterScale = Annotated[Number, Field(ge=-MOST_SCALE, le=MOST_SCALE)]


class AdapterFields(OpenBody):
    """A LoRA adapter of a request."""

    id: AdapterId
    scale: AdapterScale


MAX_ADAPTERS = 256


class AdaptedBody(OpenBody):
    """A body that chooses a model and adapters, for texts, vectors or ranks."""

    model: ModelName | None = None
    lora: Many[AdapterFields] | None = Field(
        None,
        max_length=MAX_ADAPTERS,
        description="the only adapters to apply; if absent, the one that model names, else the "
        "default ones",
    )
    truncate_prompt_tokens: Annotated[Any, Refused("send at most that many tokens", off=-1)] = None


class OwnFields(AdaptedBody):
    """The fields that every open dialect has: model and adapters, streaming, and reuse."""

    stream: Flag = False
    user: str | None = Field(None, description="prompt prefixes are reused only for the same user")
    prompt_cache_key: str | None = Field(
        None, description="prompt prefixes are reused only under the same key"
    )
    cache_salt: str | None = Field(
        None, description="prompt prefixes are reused only under the same salt"
    )
    cache_prompt: Flag = Field(True, description="false: no cached prefix is reused")
    deterministic: Flag = Field(False, description="compute this request alone, reusing nothing")

    def own(self, prefix: str) -> dict[str, Any]:
        """Their values as fields of a `Generate`, whose id begins with `prefix`."""
        id = f"{prefix}{uuid.uuid4().hex}"
        names = ("prompt_cache_key", "user", "cache_salt")
        salts = [f"{name}={value}" for name in names if (value := getattr(self, name))]
        if not self.cache_prompt:
            salts.append(f"id={id}")
        return {
            "id": id,
            "model": self.model,
            "adapters": self.lora,
            "salt": " ".join(salts) or None,
            "deterministic": self.deterministic,
            "streams": self.stream,
        }


class StructuredOutputs(OpenBody):
    """vLLM's `structured_outputs`."""

    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] = ()
    grammar: str | None = None
    json_object: Flag = False
    structural_tag: Annotated[Any, Refused("use one of the other fields")] = None


class BudgetFields(OpenBody):
    """How long the model may reason. Some templates tell the model, too."""

    reasoning_budget: Limit | None = Field(
        None,
        validation_alias=AliasChoices(
            "reasoning_budget",
            "reasoning_budget_tokens",
            "thinking_budget_tokens",
            "thinking_token_budget",
        ),
        description="the most tokens of reasoning; 0 is none, -1 is unlimited",
    )
    reasoning_budget_message: str | None = Field(
        None, max_length=4096, description="text to insert before the budget ends the reasoning"
    )


class ConstraintFields(OpenBody):
    """llama.cpp's and vLLM's fields for the form of an answer."""

    format_fields: ClassVar[frozenset[str]] = frozenset(
        ("json_schema", "grammar", "structured_outputs")
        + ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
    )
    """The fields that `formats` reads; most requests have none of them."""

    json_schema: JsonObject | None = None
    grammar: str | None = Field(
        None,
        validation_alias=AliasChoices("grammar", "grammar_string"),
        description="GBNF, or Lark in llguidance's dialect",
    )
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] = ()
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs = StructuredOutputs.model_validate({})
    regex: Annotated[Any, Refused("use guided_regex")] = None
    ebnf: Annotated[Any, Refused("use grammar")] = None

    @property
    def formats(self) -> tuple[Format, ...]:
        """The forms that these fields ask for, in order of precedence."""
        structured, prefix = self.structured_outputs, "structured_outputs."
        fields: tuple[tuple[str, Any, Callable[[Any, str], Format]], ...] = (
            ("grammar", self.grammar or None, Grammar),  # counts before a schema in llama-server
            ("json_schema", self.json_schema, _json_schema),
            ("guided_json", self.guided_json, _json_schema),
            (prefix + "json", structured.json_, _json_schema),
            ("guided_regex", self.guided_regex, Expression),
            (prefix + "regex", structured.regex, Expression),
            ("guided_choice", self.guided_choice or None, Choices),
            (prefix + "choice", structured.choice or None, Choices),
            ("guided_grammar", self.guided_grammar or None, Grammar),
            (prefix + "grammar", structured.grammar or None, Grammar),
            (prefix + "json_object", ANY_OBJECT if structured.json_object else None, _json_schema),
        )
        return tuple(made(value, path) for path, value, made in fields if value is not None)


class GenerationFields(ConstraintFields, SamplingFields, OwnFields, BudgetFields):
    """The fields of chats and plain completions."""

    default_tokens: ClassVar[int | None] = None
    """`max_tokens` where a request has none; `None` is all that the context leaves."""

    max_tokens: Integer | None = Field(
        None,
        ge=-1,
        validation_alias=AliasChoices(
            "max_completion_tokens", "max_tokens", "n_predict", "max_new_tokens"
        ),
        description="the most tokens to generate, within the context; -1: as many as possible",
    )
    n: Integer = Field(
        1,
        ge=1,
        le=MAX_CHOICES,
        validation_alias=AliasChoices("n", "n_cmpl"),
        description="number of choices per prompt",
    )
    stop: Stops = Field((), validation_alias=AliasChoices("stop", "stopping_strings"))
    stream_options: StreamOptions = StreamOptions()
    n_indent: Limit = Field(
        0, description="end at a line after the first that is indented by fewer blanks than this"
    )
    t_max_predict_ms: Limit = Field(
        0, description="this many ms after the first text, end at a line break; 0: never"
    )
    timings_per_token: Flag = Field(False, description="add timings to each part of a stream")
    return_progress: Flag = Field(
        False, description="stream chunks with prompt_progress while the prompt is computed"
    )

    def generate(
        self,
        state: AppState,
        prefix: str,
        input: Chat | tuple[Prompt, ...],
        *,
        logprobs: int | None,
    ) -> Generate:
        """The request that these fields make; its id begins with `prefix`."""
        limit = self.default_tokens if self.max_tokens is None else self.max_tokens
        return Generate(
            input=input,
            sampling=self.sampling(state, logprobs),
            max_tokens=None if limit == -1 else limit,
            formats=self.formats if self.model_fields_set & self.format_fields else (),
            stop=self.stop,
            lines=LineLimits(max(self.n_indent, 0), max(self.t_max_predict_ms, 0)),
            reasoning=UNASKED
            if isinstance(input, Chat)
            else ReasoningOptions(self.reasoning_budget, self.reasoning_budget_message),
            n=self.n,
            reports_progress=(self.return_progress or self.timings_per_token) and self.stream,
            **self.own(prefix),
        )


def _json_schema(value: str | JsonObject, path: str) -> JsonSchema:
    """The form of a schema, which clients also send as JSON text."""
    schema = parse_json(value.encode(), path) if isinstance(value, str) else value
    return JsonSchema(schema, path)
