"""Ollama's client for Python, and LangChain's and LlamaIndex's connectors over it."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractContextManager
from typing import Any

import httpx
import ollama
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.llms.ollama import Ollama

from tools.clients.actions import Server, action
from tools.clients.asked import USER, City, get_weather, refused

PYTHON, OPEN_WEBUI = "ollama-python", "open-webui"
LANGCHAIN, LLAMA_INDEX = "langchain-ollama", "llama-index-ollama"
SHORT: Any = {"num_predict": 12, "num_ctx": 4096, "temperature": 0}
CALL = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
RESULT: Any = [
    *USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "It is sunny in Paris.", "tool_name": "get_weather"},
]


# --- the client itself ---------------------------------------------------------------------


def client(server: Server) -> ollama.Client:
    return ollama.Client(server.url, timeout=50)


def ollama_refuses(word: str) -> AbstractContextManager[None]:
    """Check that the request is refused, with this word in the message."""
    return refused(
        ollama.ResponseError, lambda error: error.status_code == 400 and word in error.error
    )


@action(PYTHON, "list, show, ps")
def models(server: Server) -> None:
    api = client(server)
    [listed] = api.list().models
    assert listed.model and listed.modified_at and listed.size and listed.details
    shown = api.show(listed.model)
    assert "completion" in (shown.capabilities or [])
    assert any(key.endswith(".context_length") for key in shown.modelinfo or {})
    [running] = api.ps().models
    assert running.name == listed.model and running.expires_at


@action(PYTHON, "chat")
def chat(server: Server) -> None:
    answer = client(server).chat(server.model, USER, options=SHORT)
    assert answer.message.content and answer.done and answer.done_reason in ("stop", "length")
    assert answer.eval_count and answer.prompt_eval_count and answer.total_duration
    assert answer.eval_duration is not None and answer.prompt_eval_duration


@action(PYTHON, "chat, streamed")
def stream(server: Server) -> None:
    parts = list(client(server).chat(server.model, USER, stream=True, options=SHORT))
    assert len(parts) > 2 and parts[-1].done and not parts[0].done
    whole = client(server).chat(server.model, USER, options=SHORT)
    assert "".join(part.message.content or "" for part in parts) == whole.message.content


@action(PYTHON, "chat, async and streamed")
def async_stream(server: Server) -> None:
    async def run() -> list[Any]:
        api = ollama.AsyncClient(server.url, timeout=50)
        return [part async for part in await api.chat(server.model, USER, stream=True,
                                                       options=SHORT)]  # fmt: skip

    assert asyncio.run(run())[-1].eval_count


@action(PYTHON, "generate, with a system text")
def generate(server: Server) -> None:
    answer = client(server).generate(server.model, "Hello", system="Be brief.", options=SHORT)
    assert answer.response and answer.done_reason


@action(PYTHON, "generate, raw and streamed")
def generate_raw(server: Server) -> None:
    api = client(server)
    parts = list(api.generate(server.model, "Once", raw=True, stream=True, options=SHORT))
    assert "".join(part.response or "" for part in parts) and parts[-1].done


@action(PYTHON, "load by an empty prompt and an empty chat")
def load(server: Server) -> None:
    api = client(server)
    assert api.generate(server.model, keep_alive=-1).done_reason == "load"
    assert api.chat(server.model, []).done_reason == "load"
    assert [part.done_reason for part in api.chat(server.model, [], stream=True)] == ["load"]


@action(PYTHON, "a JSON answer", "bundled")
def json_answer(server: Server) -> None:
    answer = client(server).chat(server.model, USER, format="json", options={"num_predict": 200})
    assert isinstance(json.loads(answer.message.content or ""), dict)


@action(PYTHON, "an answer by a schema", "bundled")
def schema(server: Server) -> None:
    form = City.model_json_schema()
    answer = client(server).chat(server.model, USER, format=form, options={"num_predict": 200})
    assert City.model_validate_json(answer.message.content or "")


@action(PYTHON, "tools, as a function", "bundled")
def tools(server: Server) -> None:
    answer = client(server).chat(server.model, USER, tools=[get_weather], options=SHORT)
    assert answer.message.content or answer.message.tool_calls


@action(PYTHON, "a tool's result", "bundled")
def result(server: Server) -> None:
    answer = client(server).chat(server.model, RESULT, tools=[get_weather], options=SHORT)
    assert answer.message.content is not None


@action(PYTHON, "thinking, on, off and by level")
def think(server: Server) -> None:
    levels: Any = (True, False, "high")
    for level in levels:
        answer = client(server).chat(server.model, USER, think=level, options=SHORT)
        assert answer.message.content or answer.message.thinking


@action(PYTHON, "log-probabilities")
def logprobs(server: Server) -> None:
    answer = client(server).chat(server.model, USER, logprobs=True, top_logprobs=2, options=SHORT)
    entries = answer.logprobs or []
    assert entries and all(len(entry.top_logprobs or ()) == 2 for entry in entries)


@action(PYTHON, "an image is refused by name")
def image(server: Server) -> None:
    with ollama_refuses("images"):
        client(server).chat(server.model, [USER[0] | {"images": ["aGVsbG8="]}])


@action(PYTHON, "embeddings of a model that makes none are refused in words", "bundled")
def embed(server: Server) -> None:
    with ollama_refuses("embeddings"):
        client(server).embed(server.model, "Hello")


# --- LangChain -----------------------------------------------------------------------------


def chat_ollama(server: Server, **fields: Any) -> ChatOllama:
    given = {"num_predict": 12, "temperature": 0, "num_ctx": 4096} | fields
    return ChatOllama(model=server.model, base_url=server.url, **given)


@action(LANGCHAIN, "ChatOllama: invoke, the model validated first")
def langchain_invoke(server: Server) -> None:
    answer = chat_ollama(server, validate_model_on_init=True).invoke("Hello")
    assert answer.content and answer.usage_metadata["total_tokens"] > 0
    assert answer.response_metadata["done_reason"] in ("stop", "length")


@action(LANGCHAIN, "ChatOllama: stream")
def langchain_stream(server: Server) -> None:
    parts = list(chat_ollama(server).stream("Hello"))
    assert len(parts) > 2 and "".join(str(part.content) for part in parts)


@action(LANGCHAIN, "ChatOllama: reasoning kept apart")
def langchain_reasoning(server: Server) -> None:
    assert chat_ollama(server, reasoning=True).invoke("Hello").content


@action(LANGCHAIN, "ChatOllama: bound tools", "bundled")
def langchain_tools(server: Server) -> None:
    answer = chat_ollama(server).bind_tools([get_weather]).invoke("Weather in Paris?")
    assert answer.content or answer.tool_calls


@action(LANGCHAIN, "ChatOllama: a tool's result", "bundled")
def langchain_result(server: Server) -> None:
    call: Any = {"name": "get_weather", "args": {"city": "Paris"}, "id": "1", "type": "tool_call"}
    turns = [
        HumanMessage("Weather?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("Sunny.", tool_call_id="1"),
    ]
    assert chat_ollama(server).bind_tools([get_weather]).invoke(turns).content is not None


@action(LANGCHAIN, "ChatOllama: structured output by json_schema", "bundled")
def langchain_structured(server: Server) -> None:
    api = chat_ollama(server, num_predict=200).with_structured_output(City)
    assert isinstance(api.invoke("Paris?"), City)


@action(LANGCHAIN, "ChatOllama: structured output by json_mode", "bundled")
def langchain_json(server: Server) -> None:
    api = chat_ollama(server, num_predict=200, format="json")
    assert isinstance(json.loads(str(api.invoke("Paris?").content)), dict)


@action(LANGCHAIN, "OllamaLLM: invoke and stream")
def langchain_text(server: Server) -> None:
    api = OllamaLLM(model=server.model, base_url=server.url, num_predict=12)
    assert api.invoke("Once upon a time") and list(api.stream("Once upon a time"))


@action(LANGCHAIN, "OllamaEmbeddings are refused in words", "bundled")
def langchain_embeddings(server: Server) -> None:
    with ollama_refuses("embeddings"):
        OllamaEmbeddings(model=server.model, base_url=server.url).embed_query("Hello")


# --- LlamaIndex ----------------------------------------------------------------------------


def llama_index(server: Server, **fields: Any) -> Ollama:
    given = {"model": server.model, "base_url": server.url, "request_timeout": 50}
    more = {"num_predict": fields.pop("num_predict", 12)}
    return Ollama(**given, additional_kwargs=more, **fields)


HELLO = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello")]


@action(LLAMA_INDEX, "Ollama: chat, the context asked for first")
def index_chat(server: Server) -> None:
    api = llama_index(server)
    assert api.chat(HELLO).message.content
    assert 0 < api.get_context_window() < 2**31


@action(LLAMA_INDEX, "Ollama: complete, streamed")
def index_stream(server: Server) -> None:
    assert len(list(llama_index(server).stream_complete("Once upon a time"))) > 1


@action(LLAMA_INDEX, "Ollama: chat, async and streamed")
def index_async(server: Server) -> None:
    async def run() -> list[Any]:
        return [part async for part in await llama_index(server).astream_chat(HELLO)]

    assert asyncio.run(run())[-1].message.content


@action(LLAMA_INDEX, "Ollama: a structured answer", "bundled")
def index_structured(server: Server) -> None:
    found = llama_index(server, num_predict=200).as_structured_llm(City).complete("Paris?")
    assert isinstance(found.raw, City)


@action(LLAMA_INDEX, "Ollama: tools offered", "bundled")
def index_tools(server: Server) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    answer = llama_index(server).chat_with_tools([tool], "Weather in Paris?")
    assert answer.message.blocks


@action(LLAMA_INDEX, "OllamaEmbedding is refused in words", "bundled")
def index_embedding(server: Server) -> None:
    with ollama_refuses("embeddings"):
        OllamaEmbedding(server.model, base_url=server.url).get_text_embedding("Hello")


# --- Open WebUI: the requests of its router --------------------------------------------------


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    named = {"model": f"{server.model}:latest", **body}
    answer = httpx.post(server.url + path, json=named, timeout=50, trust_env=False)
    assert answer.status_code == 200, answer.text[:300]
    return answer


@action(OPEN_WEBUI, "a connection is verified, its models are merged with those that run")
def webui_models(server: Server) -> None:
    assert httpx.get(f"{server.url}/api/version").json()["version"]
    listed = httpx.get(f"{server.url}/api/tags").json()["models"]
    running = {each["name"]: each["expires_at"] for each in
               httpx.get(f"{server.url}/api/ps").json()["models"]}  # fmt: skip
    assert all(each["model"] and each["name"] in running for each in listed)


@action(OPEN_WEBUI, "a chat, line by line")
def webui_chat(server: Server) -> None:
    options = SHORT | {"num_keep": 24, "mirostat": 0}
    fields = {"stream": True, "options": options, "keep_alive": "5m"}
    answer = post(server, "/api/chat", messages=USER, **fields)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert all(line["message"]["content"] is not None for line in lines)
    assert lines[-1]["done"] and lines[-1]["eval_duration"] >= 0


@action(OPEN_WEBUI, "a title by a whole chat")
def webui_title(server: Server) -> None:
    assert post(server, "/api/chat", messages=USER, stream=False, options=SHORT).json()["done"]


@action(OPEN_WEBUI, "a model is unloaded")
def webui_unload(server: Server) -> None:
    assert post(server, "/api/generate", keep_alive=0, prompt="").json()["done"]
