"""OpenAI's bodies as pydantic models, with the additional fields of llama.cpp and vLLM.

Every field here takes effect; any other field is ignored and reported by name. Pure data, any
thread.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from worker.api.chat.chat_fields import ChatFields
from worker.api.chat.fields import (
    ANY_OBJECT,
    MAX_PROMPTS,
    MAX_TOP_LOGPROBS,
    ByKind,
    GenerationFields,
    Item,
    Many,
    prompts_of_at_most,
)
from worker.api.chat.request import Format, JsonSchema, Reasoning
from worker.api.http.body import Flag, Integer, JsonObject, OpenBody

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


class ChatBody(GenerationFields, ChatFields):
    """`POST /v1/chat/completions`."""

    logprobs: Flag = False
    top_logprobs: Integer | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: ResponseFormat | None = None
    tool_choice: WordOr[FunctionChoice] | None = None
    parallel_tool_calls: Flag | None = Field(
        None,
        description="false: one call at most; true: where a call is required, several may come",
    )
    modalities: Many[Literal["text"]] = ()
    reasoning_effort: str | None = Field(
        None,
        description="none, low, medium, high or another word that the model's template knows; "
        "for other templates it is a budget",
    )
    reasoning_format: Literal["none", "auto", "deepseek"] | None = Field(
        None, description="none: reasoning stays in the text; else it is reasoning_content"
    )
    verbosity: str | None = Field(None, description="a variable of the template")
    enable_thinking: Flag | None = Field(None, description="false: the model does not reason")

    format_fields = GenerationFields.format_fields | {"response_format"}

    @property
    def reasoning(self) -> Reasoning:
        form = self.reasoning_format
        return Reasoning(
            budget=self.reasoning_budget,
            message=self.reasoning_budget_message,
            effort=self.reasoning_effort,
            enabled=self.enable_thinking,
            splits=None if form is None else form != "none",
        )

    @property
    def format(self) -> Format | None:
        form = self.response_format
        if form is None or form.type == "text":
            return super().format
        if form.json_schema is not None:
            path, strict = "response_format.json_schema.schema", form.json_schema.strict is True
            return JsonSchema(form.json_schema.schema_, path, strict)
        if form.schema_ is not None:
            return JsonSchema(form.schema_, "response_format.schema")
        return JsonSchema(ANY_OBJECT, "response_format")


class CompletionBody(GenerationFields):
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
