"""`llm`, the command, by its `extra-openai-models.yaml`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.clients.actions import Server, action
from tools.clients.command_lines import ran

NAME = "llm"


def llm(server: Server, *commands: Sequence[str], **settings: Any) -> list[str]:
    """Returns the output of each command; the commands share a log."""
    entry = {"model_id": "here", "model_name": server.model, "api_base": server.v1, **settings}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # JSON is YAML, too.
        (folder / "extra-openai-models.yaml").write_text(json.dumps([entry]), "utf-8")
        variables = {"LLM_USER_PATH": name, "OPENAI_API_KEY": "any"}
        return [ran(["llm", *command], folder, variables) for command in commands]


def prompted(name: str, *flags: str, needs: Any = "instruct", **settings: Any) -> None:
    @action(NAME, name, needs)
    def run(server: Server) -> None:
        [text] = llm(
            server, ["-m", "here", "Say hello.", "-o", "max_tokens", "12", *flags], **settings
        )
        assert text.strip()


prompted("a prompt, streamed")
prompted("a prompt, whole", "--no-stream")
prompted("a model that cannot stream", can_stream=False)
prompted("a system prompt and options", "-s", "Be brief.", "-o", "temperature", "0.3",
         "-o", "seed", "7", "-o", "stop", "XYZ", "-o", "json_object", "0")  # fmt: skip


@action(NAME, "a conversation goes on")
def conversation(server: Server) -> None:
    head = ["-o", "max_tokens", "8"]
    first, second = llm(server, ["-m", "here", "Hello", *head], ["-c", "And?", *head])
    assert first.strip() and second.strip()


@action(NAME, "a schema", "bundled")
def schema(server: Server) -> None:
    flags = ["--schema", "name, age int", "--no-stream"]
    [text] = llm(server, ["-m", "here", "A person", *flags], supports_schema=True)
    assert set(json.loads(text)) == {"name", "age"}


@action(NAME, "a tool is offered", "bundled")
def tool(server: Server) -> None:
    flags = ["-T", "llm_version", "-o", "max_tokens", "40"]
    llm(server, ["-m", "here", "What is the capital of France?", *flags], supports_tools=True)


@action(NAME, "the completion route")
def completion(server: Server) -> None:
    flags = ["-o", "max_tokens", "8"]
    [text] = llm(server, ["-m", "here", "Once upon a time", *flags], completion=True)
    assert text.strip()
