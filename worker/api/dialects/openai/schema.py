"""OpenAI's bodies as pydantic models, and their conversion to requests.

They include the additional fields of llama.cpp and vLLM. Any other field is ignored, and named in
the answer's headers. Any thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from worker.api.chat.chat_fields import ReasoningChatFields
from worker.api.chat.field_types import ANY_OBJECT, TopLogprobs
from worker.api.chat.fields import GenerationFields
from worker.api.chat.prompt_fields import MAX_PROMPTS, prompts_of, prompts_of_at_most
from worker.api.chat.request import Format, Generate, JsonSchema
from worker.api.http.body import Flag, Integer, JsonObject, Many, OpenBody, Refused
from worker.api.http.faults import refusal, wrong
from worker.api.http.state import AppState
from worker.wire.work import InfillPrompt, MarkedPrompt, MixedTokens, Prompt


class JsonSchemaFormat(OpenBody):
    name: str | None = None
    schema_: JsonObject = Field(validation_alias="schema", description="a JSON schema")
    strict: Flag | None = None


class ResponseFormat(OpenBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: JsonObject | None = Field(
        None, validation_alias="schema", description="a JSON schema, for llama.cpp's clients"
    )

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise wrong(
                "required", "of type json_schema needs json_schema: an object with a schema"
            )
        return self


class FormatFields(GenerationFields):
    """The fields of `GenerationFields` with OpenAI's own format beside them."""

    response_format: ResponseFormat | None = None

    format_fields = GenerationFields.format_fields | {"response_format"}

    @property
    def formats(self) -> tuple[Format, ...]:
        form, others = self.response_format, super().formats
        if form is None or form.type == "text":
            return others
        if form.json_schema is not None:
            path, strict = "response_format.json_schema.schema", form.json_schema.strict is True
            return (JsonSchema(form.json_schema.schema_, path, strict), *others)
        if form.schema_ is not None:
            return (JsonSchema(form.schema_, "response_format.schema"), *others)
        return (JsonSchema(ANY_OBJECT, "response_format"), *others)


class ChatBody(FormatFields, ReasoningChatFields):
    """A chat, and how to answer it."""

    logprobs: Flag = Field(False, description="report log-probabilities of the answer's tokens")
    top_logprobs: TopLogprobs | None = Field(None, description="alternatives to report per token")
    modalities: Many[Literal["text"]] = ()
    include_reasoning: Flag = Field(True, description="false: the answer has no reasoning_content")
    functions: Annotated[Any, Refused("send them as tools")] = None
    echo: Annotated[Any, Refused("the last message is in the request")] = None

    @field_validator("max_tokens")
    @classmethod
    def _is_not_zero(cls, value: int | None) -> int | None:
        if value == 0:
            raise wrong("minimum", "must be an integer of at least 1, or -1")
        return value


class CompletionBody(FormatFields):
    """A text to continue, and how."""

    prompt: prompts_of_at_most(MAX_PROMPTS)  # type: ignore[valid-type]
    logprobs: TopLogprobs | None = Field(None, description="alternatives to report per token")
    prompt_logprobs: TopLogprobs | None = Field(
        None, description="report log-probabilities of prompt tokens and this many alternatives"
    )
    best_of: Integer | None = Field(
        None, ge=1, description="must be at most n: all generated choices are returned"
    )
    echo: Flag = Field(
        False, description="begin the answer with the prompt and, if requested, its logprobs"
    )
    suffix: str | None = Field(
        None, description="the text after the answer; needs a model with fill-in-the-middle tokens"
    )
    prompt_embeds: Annotated[Any, Refused("send the prompt as text or tokens")] = None

    default_tokens = 16
    """OpenAI's default of `max_tokens`."""


def read_chat(body: ChatBody, state: AppState) -> Generate:
    """
    Raises:
        InvalidRequest: the fields do not fit together.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise refusal("top_logprobs", "requires", "needs logprobs: true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return body.generate(state, "chatcmpl-", body.reasoning_chat(), logprobs=logprobs)


def read_completion(body: CompletionBody, state: AppState) -> Generate:
    """
    Raises:
        InvalidRequest: the fields do not fit together.
    """
    if body.best_of is not None and body.best_of > body.n:
        what = "must be at most n: all choices that are generated are returned"
        raise refusal("best_of", "maximum", what, body.best_of)
    prompts = tuple(_with_suffix(prompt, body.suffix) for prompt in prompts_of(body.prompt))
    if body.echo and not all(isinstance(prompt, str | tuple) for prompt in prompts):
        what = "requires a prompt of text and tokens, without media and suffix"
        raise refusal("echo", "conflict", what)
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    n_of_prompt = max((n for n in wanted if n is not None), default=None)
    asked = body.generate(state, "cmpl-", prompts, logprobs=body.logprobs)
    scores_end = n_of_prompt is not None
    return replace(asked, prompt_logprobs=n_of_prompt, scores_end=scores_end, echo=body.echo)


def _with_suffix(prompt: str | MixedTokens | MarkedPrompt, suffix: str | None) -> Prompt:
    if not suffix:
        return prompt
    if not isinstance(prompt, str):
        raise refusal("suffix", "conflict", "requires a prompt that is one text")
    return InfillPrompt(prompt, suffix)
