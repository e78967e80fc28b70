"""The bodies of the worker's own paths as pydantic models; unknown fields are refused.

The models carry this worker's limits, and `/openapi.json` publishes them.
"""

from __future__ import annotations

import secrets
import uuid
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model

from worker.api.chat.field_types import Limit
from worker.api.chat.fields import MAX_ADAPTERS, AdapterId, AdapterScale
from worker.api.chat.request import Generate, ReasoningOptions
from worker.api.chat.sampling import MAX_BREAKERS, MAX_SEED, number_fields
from worker.api.http.body import Body, Flag, Integer, Many
from worker.api.http.state import AppState
from worker.wire.sampling import (
    DEFAULT_BREAKERS,
    MAX_SAMPLERS,
    ORDER,
    PARAMETERS,
    SAMPLERS,
    Sampling,
)

MAX_JOB_ID_CHARS = 256

JobId = Annotated[str, Field(min_length=1, max_length=MAX_JOB_ID_CHARS)]


Stop = Annotated[str, Field(min_length=1, max_length=100)]


if TYPE_CHECKING:
    _Numbers = Body
else:
    _Numbers = create_model("_Numbers", __base__=Body, **number_fields(is_open=False))


class AdapterBody(Body):
    """A LoRA adapter to apply."""

    id: AdapterId
    scale: AdapterScale


class InferenceBody(_Numbers):
    """A job in the worker's native form."""

    job_id: JobId | None = Field(None, description="name of the job, unique among running jobs")
    prompt: str = Field(min_length=1, description="text to continue; special tokens are parsed")
    max_tokens: Integer | None = Field(None, ge=1, description="the most tokens to generate")
    stop: Many[Stop] = Field(
        (), max_length=4, description="texts that end the output, which never contains them"
    )
    seed: Integer | None = Field(
        None, ge=0, le=MAX_SEED, description="random if absent; the answer reports it"
    )
    samplers: Many[Literal[SAMPLERS]] = Field(  # type: ignore[valid-type]
        ORDER, max_length=MAX_SAMPLERS, description="the samplers to apply, in order"
    )
    dry_sequence_breakers: Many[str] = Field(
        DEFAULT_BREAKERS, max_length=MAX_BREAKERS, description="texts that end a repetition for dry"
    )
    ignore_eos: Flag = Field(False, description="never draw an end-of-generation token")
    reasoning_budget: Limit = Field(-1, description="the most tokens of reasoning; -1: no limit")
    lora: Many[AdapterBody] | None = Field(
        None,
        max_length=MAX_ADAPTERS,
        description="the only adapters to apply; if absent, the default ones",
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="prompt prefixes are reused only between requests with the same salt",
    )
    deterministic: Flag = Field(False, description="compute this request alone, reusing nothing")


def inference_body(state: AppState, *, needs_job_id: bool = False) -> type[InferenceBody]:
    """The body's model with this worker's limits; `/execute` requires a job id."""
    prompt_chars = state.settings.max_prompt_chars
    return _inference_body(
        prompt_chars, state.served.max_tokens_out, state.served.vocab_size, needs_job_id
    )


@lru_cache(maxsize=8)
def _inference_body(
    prompt_chars: int | None, tokens_out: int, vocab_size: int, needs_job_id: bool
) -> type[InferenceBody]:
    bounded: dict[str, tuple[Any, Any]] = {
        "prompt": (Annotated[str, Field(min_length=1, max_length=prompt_chars)], ...),
        "max_tokens": (Annotated[Integer, Field(ge=1, le=tokens_out)], tokens_out),
        "top_k": (Annotated[Integer, Field(ge=0, le=vocab_size)], 0),
    }
    if needs_job_id:
        bounded["job_id"] = (JobId, ...)
    fields: dict[str, Any] = {
        name: (kind, Field(default, description=InferenceBody.model_fields[name].description))
        for name, (kind, default) in bounded.items()
    }
    name = "ExecuteRequest" if needs_job_id else "InferenceRequest"
    return create_model(name, __base__=InferenceBody, **fields)


class CancelBody(Body):
    job_id: JobId


def read_inference(body: InferenceBody, state: AppState) -> Generate:
    return Generate(
        id=body.job_id or str(uuid.uuid4()),
        input=(body.prompt,),
        sampling=Sampling(
            seed=secrets.randbits(64) if body.seed is None else body.seed,
            is_seeded=body.seed is not None,
            **{name: getattr(body, name) for name in PARAMETERS},
            samplers=body.samplers,
            dry_sequence_breakers=body.dry_sequence_breakers,
            ignore_eos=body.ignore_eos,
        ),
        max_tokens=body.max_tokens,
        stop=body.stop,
        reasoning=ReasoningOptions(budget=body.reasoning_budget),
        adapters=body.lora,
        salt=body.cache_salt,
        deterministic=body.deterministic,
    )
