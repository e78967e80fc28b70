"""pydantic-ai, over OpenAI's and Anthropic's protocols."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tools.clients.actions import Server, action
from tools.clients.asked import City

EXACTLY: Any = {"max_tokens": 200, "temperature": 0}
"""Greedy, because a tiny model that samples may write an endless name."""


def pydantic_model(server: Server) -> Any:
    return OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.v1, api_key="any"))


@action("pydantic-ai", "run")
def pydantic_run(server: Server) -> None:
    agent = Agent(pydantic_model(server), model_settings={"max_tokens": 12})
    assert agent.run_sync("Hello").output is not None


@action("pydantic-ai", "an output type by a tool", "bundled")
def pydantic_output(server: Server) -> None:
    agent = Agent(pydantic_model(server), output_type=City, model_settings=EXACTLY)
    assert isinstance(agent.run_sync("Paris?").output, City)


@action("pydantic-ai", "an output type by native output", "bundled")
def pydantic_native(server: Server) -> None:
    output = NativeOutput(City)
    agent = Agent(pydantic_model(server), output_type=output, model_settings=EXACTLY)
    assert isinstance(agent.run_sync("Paris?").output, City)


@action("pydantic-ai", "streamed")
def pydantic_stream(server: Server) -> None:
    async def pieces() -> list[str]:
        agent = Agent(pydantic_model(server), model_settings={"max_tokens": 12})
        async with agent.run_stream("Hello") as run:
            return [piece async for piece in run.stream_text(delta=True)]

    assert asyncio.run(pieces())


@action("pydantic-ai", "AnthropicModel")
def pydantic_anthropic(server: Server) -> None:
    provider = AnthropicProvider(base_url=server.url, api_key="any")
    agent = Agent(
        AnthropicModel(server.model, provider=provider), model_settings={"max_tokens": 12}
    )
    assert agent.run_sync("Hello").output is not None
