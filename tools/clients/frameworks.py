"""Frameworks over OpenAI's and Anthropic's protocols.

Each is imported by its own actions, so that a missing one fails only those.
"""

from __future__ import annotations

import os
from typing import Any

from tools.clients.actions import Server, action
from tools.clients.asked import USER, WEATHER, City

# --- litellm ---


def litellm_completion(server: Server, provider: str, **fields: Any) -> Any:
    import litellm

    litellm.suppress_debug_info = True
    given = {"messages": USER, "max_tokens": 12, "api_key": "any", "timeout": 50}
    base = server.url if provider == "anthropic" else server.v1
    return litellm.completion(model=f"{provider}/{server.model}", api_base=base, **(given | fields))


def litellm_action(provider: str, name: str, model: Any = "instruct", **fields: Any) -> None:
    @action("litellm", f"{provider}/: {name}", model)
    def run(server: Server) -> None:
        answer = litellm_completion(server, provider, **fields)
        if fields.get("stream"):
            assert len(list(answer)) > 1
        else:
            assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


for _provider in ("openai", "hosted_vllm", "anthropic"):
    litellm_action(_provider, "defaults")
    litellm_action(_provider, "streamed", stream=True)
    litellm_action(_provider, "tools, auto", "bundled", tools=[WEATHER], max_tokens=60)
    litellm_action(_provider, "a tool's result", "bundled", tools=[WEATHER], messages=[
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "clear"},
    ])  # fmt: skip
litellm_action("openai", "json_object", response_format={"type": "json_object"}, max_tokens=60)
litellm_action("openai", "a model as response_format", "bundled", response_format=City,
               max_tokens=200)  # fmt: skip
litellm_action("openai", "drop nothing: user, seed, penalties", user="u", seed=1,
               presence_penalty=0.1)  # fmt: skip


@action("litellm", "text_completion")
def litellm_text(server: Server) -> None:
    import litellm

    answer = litellm.text_completion(
        model=f"text-completion-openai/{server.model}", prompt="Once", max_tokens=6,
        api_base=server.v1, api_key="any",
    )  # fmt: skip
    assert answer.choices[0].text is not None


# --- LangChain and LangGraph ---


def langchain(server: Server, **fields: Any) -> Any:
    from langchain_openai import ChatOpenAI

    given = {"base_url": server.v1, "api_key": "any", "model": server.model, "max_retries": 0}
    return ChatOpenAI(**(given | {"max_tokens": 16, "timeout": 50} | fields))


@action("langchain", "invoke")
def langchain_invoke(server: Server) -> None:
    assert langchain(server).invoke("Hello").content is not None


@action("langchain", "stream with usage")
def langchain_stream(server: Server) -> None:
    assert len(list(langchain(server, stream_usage=True).stream("Hello"))) > 1


@action("langchain", "batch")
def langchain_batch(server: Server) -> None:
    assert len(langchain(server).batch(["One", "Two", "Three"])) == 3


@action("langchain", "structured output by json_schema", "bundled")
def langchain_json_schema(server: Server) -> None:
    found = langchain(server, max_tokens=200).with_structured_output(City).invoke("Paris?")
    assert isinstance(found, City)


@action("langchain", "structured output by function_calling", "bundled")
def langchain_function_calling(server: Server) -> None:
    chain = langchain(server, max_tokens=200).with_structured_output(
        City, method="function_calling"
    )
    assert isinstance(chain.invoke("Paris?"), City)


@action("langchain", "structured output by json_mode", "bundled")
def langchain_json_mode(server: Server) -> None:
    chain = langchain(server, max_tokens=200).with_structured_output(
        City, method="json_mode", include_raw=True
    )
    assert chain.invoke("Answer in JSON: Paris?")["raw"].content


@action("langchain", "bind_tools and a forced call", "bundled")
def langchain_tools(server: Server) -> None:
    bound = langchain(server, max_tokens=120).bind_tools([WEATHER], tool_choice="get_weather")
    assert bound.invoke("Weather in Paris?").tool_calls[0]["name"] == "get_weather"


@action("langchain", "responses API")
def langchain_responses(server: Server) -> None:
    assert langchain(server, use_responses_api=True).invoke("Hello").content


@action("langchain", "ChatAnthropic")
def langchain_anthropic(server: Server) -> None:
    from langchain_anthropic import ChatAnthropic

    chat: Any = ChatAnthropic  # its constructor's aliases are not typed
    api = chat(base_url=server.url, api_key="any", model=server.model, max_tokens=16, max_retries=0)
    assert api.invoke("Hello").content is not None


@action("langgraph", "an agent that calls a tool once", "bundled")
def langgraph_agent(server: Server) -> None:
    from langgraph.prebuilt import create_react_agent

    def get_weather(city: str) -> str:
        """Weather of a city."""
        return f"It is sunny in {city}."

    agent = create_react_agent(langchain(server, max_tokens=60), [get_weather])
    messages: Any = {"messages": [("user", "What is the capital of France?")]}
    ended = agent.invoke(messages, {"recursion_limit": 6})
    assert len(ended["messages"]) >= 2


# --- openai-agents ---


def agents_run(server: Server, responses: bool) -> str:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    os.environ.setdefault("OPENAI_API_KEY", "any")
    set_tracing_disabled(True)
    api = AsyncOpenAI(base_url=server.v1, api_key="any", max_retries=0, timeout=50)
    kind: Any = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
    agent = Agent(
        name="a", instructions="Be brief.", model=kind(model=server.model, openai_client=api)
    )
    return str(Runner.run_sync(agent, "What is the capital of France?", max_turns=2).final_output)


@action("openai-agents", "over chat completions", "bundled")
def agents_chat(server: Server) -> None:
    assert agents_run(server, responses=False)


@action("openai-agents", "over responses", "bundled")
def agents_responses(server: Server) -> None:
    assert agents_run(server, responses=True)
