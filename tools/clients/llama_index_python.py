"""LlamaIndex over OpenAI's protocol, by its OpenAILike."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

from tools.clients.actions import Server, action
from tools.clients.asked import City, get_weather, refused

NAME = "llama-index"
HELLO = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello")]


def llm(server: Server, **fields: Any) -> OpenAILike:
    given = {"max_tokens": 16, "is_chat_model": True, "is_function_calling_model": True}
    head = {"model": server.model, "api_base": server.v1, "api_key": "any", "max_retries": 0}
    return OpenAILike(**(head | {"timeout": 50} | given | fields))


@action(NAME, "complete over the chat")
def complete(server: Server) -> None:
    assert llm(server).complete("Say hello.").text


@action(NAME, "complete over completions")
def complete_plainly(server: Server) -> None:
    assert llm(server, is_chat_model=False).complete("Once upon a time").text


@action(NAME, "chat")
def chat(server: Server) -> None:
    assert llm(server).chat(HELLO).message.content


@action(NAME, "chat, streamed")
def stream(server: Server) -> None:
    assert len(list(llm(server).stream_chat(HELLO))) > 1


@action(NAME, "chat, async and streamed")
def async_stream(server: Server) -> None:
    async def pieces() -> list[Any]:
        return [piece async for piece in await llm(server).astream_chat(HELLO)]

    assert len(asyncio.run(pieces())) > 1


@action(NAME, "complete over completions, streamed")
def stream_plainly(server: Server) -> None:
    assert list(llm(server, is_chat_model=False).stream_complete("Once upon a time"))


@action(NAME, "a structured answer by a forced call", "bundled")
def structured(server: Server) -> None:
    found = llm(server, max_tokens=200).as_structured_llm(City).complete("Paris?")
    assert isinstance(found.raw, City)


@action(NAME, "a structured answer by json_schema", "bundled")
def structured_output(server: Server) -> None:
    api = llm(server, max_tokens=200, should_use_structured_outputs=True)
    assert isinstance(api.as_structured_llm(City).complete("Paris?").raw, City)


@action(NAME, "a tool that must be called", "bundled")
def called(server: Server) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    api = llm(server, max_tokens=120)
    answer = api.chat_with_tools([tool], "Weather in Paris?", tool_required=True)
    [call] = api.get_tool_calls_from_response(answer)
    assert call.tool_name == "get_weather"


@action(NAME, "an agent's turn", "bundled")
def agent(server: Server) -> None:
    from llama_index.core.agent.workflow import FunctionAgent

    async def run() -> str:
        worker = FunctionAgent(tools=[get_weather], llm=llm(server, max_tokens=40))
        return str(await worker.run("What is the capital of France?", max_iterations=4))

    assert asyncio.run(run())


@action(NAME, "embeddings of a model that makes none are refused in words", "bundled")
def embeddings(server: Server) -> None:
    api = OpenAILikeEmbedding(
        model_name=server.model, api_base=server.v1, api_key="any", max_retries=0
    )

    def is_of_the_model(error: openai.BadRequestError) -> bool:
        return error.param == "model" and "embeddings" in str(error)

    with refused(openai.BadRequestError, is_of_the_model):
        api.get_text_embedding("Hello")
