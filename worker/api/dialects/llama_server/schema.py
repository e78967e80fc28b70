"""llama-server's bodies that OpenAI's API lacks, and its form of errors. Any thread."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec.structs import replace
from pydantic import AliasChoices, Field, model_validator

from worker.api.chat.chat_fields import MAX_MESSAGES, MessageFields, ReasoningChatFields
from worker.api.chat.fields import MAX_ADAPTERS, AdapterFields, GenerationFields
from worker.api.chat.prompt_fields import MAX_PROMPTS, Mixed, prompts_of_at_most
from worker.api.chat.sampling import LLAMA_CPP_WINDOW, LlamaCppBiases, SamplingFields, TokenId
from worker.api.http.body import Flag, Integer, Many, Number, OpenBody
from worker.api.http.errors import NESTED, nested_error
from worker.api.http.faults import is_number
from worker.api.http.operation import ErrorForm
from worker.api.http.state import AppState
from worker.errors import ContextLengthExceeded, WorkerError
from worker.wire.sampling import PARAMETERS, Sampling

MAX_LOGPROBS = 2**20
"""The most in one answer that has more than `MAX_TOP_LOGPROBS` per token."""

REFERENCE = "https://github.com/ggml-org/llama.cpp/tree/master/tools/server"


class TokenizeBody(ReasoningChatFields):
    """A text, or a chat as in vLLM."""

    content: Mixed | None = Field(
        None,
        validation_alias=AliasChoices("content", "prompt"),
        description="a text, or a list of token ids and texts",
    )
    messages: Many[MessageFields] = Field((), max_length=MAX_MESSAGES)
    add_special: Flag = Field(
        False,
        validation_alias=AliasChoices("add_special", "add_special_tokens"),
        description="add BOS if the model expects it; a chat always has it",
    )
    parse_special: Flag = Field(True, description="parse special tokens in the text")
    with_pieces: Flag = Field(False, description="return each token's text with its id")
    return_token_strs: Flag = Field(False, description="return the tokens' texts in token_strs")


class DetokenizeBody(OpenBody):
    tokens: Many[TokenId] = ()


_NEAREST = {
    name: known.nearest
    for known in PARAMETERS.values()
    for name in known.names
    if known.nearest_in is not None
}


Penalty = Annotated[Number, Field(ge=-1000, le=1000)]


class TextBody(GenerationFields):
    """The common fields of llama-server's own paths for generation."""

    n_probs: Integer | None = Field(
        None,
        ge=-(2**31),
        le=2**31 - 1,
        validation_alias=AliasChoices("n_probs", "logprobs"),
        description="report log-probabilities of the answer's tokens and of this many "
        "alternatives; 0 or less: none",
    )
    frequency_penalty: Penalty | None = Field(
        None, description=PARAMETERS["frequency_penalty"].text
    )
    presence_penalty: Penalty | None = Field(None, description=PARAMETERS["presence_penalty"].text)
    logit_bias: LlamaCppBiases = Field(
        (), description=SamplingFields.model_fields["logit_bias"].description
    )
    post_sampling_probs: Flag = Field(
        False, description="report probabilities after the samplers instead of log-probabilities"
    )
    return_tokens: Flag = Field(False, description="return the tokens' ids with the text")
    response_fields: Many[str] = Field(
        (),
        max_length=64,
        description="the only fields of the final answer; a/b is field b of field a",
    )

    counted_tokens = LLAMA_CPP_WINDOW

    def sampling(self, state: AppState, logprobs: int | None = None) -> Sampling:
        is_after = self.post_sampling_probs
        return replace(super().sampling(state, logprobs), post_sampling_probs=is_after)

    @model_validator(mode="before")
    @classmethod
    def _clamped(cls, value: Any) -> Any:
        """Replace out-of-range numbers as llama-server does."""
        if not isinstance(value, dict):
            return value
        return {
            name: _NEAREST[name](each) if name in _NEAREST and is_number(each) else each
            for name, each in value.items()
        }


class AdaptersBody(OpenBody):
    """A list of adapters, or an object with such a list, which is required: a single adapter sent
    by mistake would otherwise turn all of them off."""

    lora: Many[AdapterFields] = Field(max_length=MAX_ADAPTERS)

    list_field = "lora"


class CompletionBody(TextBody):
    """A text to continue, and how."""

    prompt: prompts_of_at_most(MAX_PROMPTS)  # type: ignore[valid-type]


class ProjectFile(OpenBody):
    filename: str = "tmp"
    text: str


class InfillBody(TextBody):
    """The texts before and after a gap, and how to fill it."""

    input_prefix: str = Field(description="the text before the gap")
    input_suffix: str = Field(description="the text after the gap")
    prompt: str = Field("", description="further text before the gap, after input_prefix")
    input_extra: Many[ProjectFile] = Field(
        (), max_length=256, description="other files of the project"
    )


def _error(error: WorkerError, correlation_id: str) -> dict[str, Any]:
    """OpenAI's form, with another type for a prompt that is too long."""
    body = nested_error(error, correlation_id)
    if isinstance(error, ContextLengthExceeded):
        body["error"] |= {
            "type": "exceed_context_size_error",
            "n_prompt_tokens": error.details["prompt_tokens"],
            "n_ctx": error.details["context_length"],
        }
    return body


ERRORS = ErrorForm(_error, NESTED.schema)
