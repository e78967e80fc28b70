"""llama-server's bodies that OpenAI's API does not have, and its form of a failure. Any thread."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, Field, model_validator

from worker.api.chat.chat_fields import MAX_MESSAGES, MessageFields, ReasoningChatFields
from worker.api.chat.fields import MAX_ADAPTERS, AdapterFields, GenerationFields
from worker.api.chat.prompt_fields import MAX_PROMPTS, Mixed, prompts_of_at_most
from worker.api.chat.sampling import LLAMA_CPP_WINDOW, LlamaCppBiases, SamplingFields, TokenId
from worker.api.http.body import Flag, Integer, Many, Number, OpenBody
from worker.api.http.errors import NESTED, nested_error
from worker.api.http.faults import is_number
from worker.api.http.operation import ErrorForm
from worker.errors import ContextLengthExceeded, WorkerError
from worker.wire.sampling import PARAMETERS

MAX_LOGPROBS = 2**20
"""Of one answer, beyond those that every answer may have."""

REFERENCE = "https://github.com/ggml-org/llama.cpp/tree/master/tools/server"


class TokenizeBody(ReasoningChatFields):
    """A text, or as vLLM takes it a chat."""

    content: Mixed | None = Field(
        None,
        validation_alias=AliasChoices("content", "prompt"),
        description="a text, or token ids with texts among them",
    )
    messages: Many[MessageFields] = Field((), max_length=MAX_MESSAGES)
    add_special: Flag = Field(
        False,
        validation_alias=AliasChoices("add_special", "add_special_tokens"),
        description="add BOS as the model wants it; a chat has it anyway",
    )
    parse_special: Flag = Field(True, description="special tokens are recognised in the text")
    with_pieces: Flag = Field(False, description="answer each token's text beside its id")


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
    """The common fields of llama-server's own paths that generate."""

    n_probs: Integer | None = Field(
        None,
        ge=-(2**31),
        le=2**31 - 1,
        validation_alias=AliasChoices("n_probs", "logprobs"),
        description="log-probabilities of the answer's tokens and of so many alternatives; none "
        "of 0 or fewer",
    )
    frequency_penalty: Penalty | None = Field(
        None, description=PARAMETERS["frequency_penalty"].text
    )
    presence_penalty: Penalty | None = Field(None, description=PARAMETERS["presence_penalty"].text)
    logit_bias: LlamaCppBiases = Field(
        (), description=SamplingFields.model_fields["logit_bias"].description
    )
    post_sampling_probs: Flag = Field(
        False, description="probabilities at the end of the samplers, in place of n_probs' own"
    )
    return_tokens: Flag = Field(False, description="answer the tokens' ids beside the text")
    response_fields: Many[str] = Field(
        (),
        max_length=64,
        description="the whole answer has these fields alone; a/b is field b of field a",
    )

    counted_tokens = LLAMA_CPP_WINDOW

    @model_validator(mode="before")
    @classmethod
    def _taken(cls, value: Any) -> Any:
        """Numbers beyond their ranges as llama-server takes them."""
        if not isinstance(value, dict):
            return value
        return {
            name: _NEAREST[name](given) if name in _NEAREST and is_number(given) else given
            for name, given in value.items()
        }


class AdaptersBody(OpenBody):
    """`POST /lora-adapters`: a list, or an object that has it.

    The list is no option: one adapter outside of a list would turn all of them off.
    """

    lora: Many[AdapterFields] = Field(max_length=MAX_ADAPTERS)

    list_field = "lora"


class CompletionBody(TextBody):
    """`POST /completion`."""

    prompt: prompts_of_at_most(MAX_PROMPTS)  # type: ignore[valid-type]


class ProjectFile(OpenBody):
    filename: str = "tmp"
    text: str


class InfillBody(TextBody):
    """`POST /infill`."""

    input_prefix: str
    input_suffix: str
    prompt: str = Field("", description="goes on where input_prefix ends")
    input_extra: Many[ProjectFile] = Field(
        (), max_length=256, description="other files of the project"
    )


def _error(error: WorkerError, correlation_id: str) -> dict[str, Any]:
    """OpenAI's form, with a type of its own for a prompt that is too long."""
    told = nested_error(error, correlation_id)
    if isinstance(error, ContextLengthExceeded):
        told["error"] |= {
            "type": "exceed_context_size_error",
            "n_prompt_tokens": error.details["prompt_tokens"],
            "n_ctx": error.details["context_length"],
        }
    return told


ERRORS = ErrorForm(_error, NESTED.schema)
