"""outlines, which constrains answers to types over OpenAI's and vLLM's protocols."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import outlines

from tools.clients.actions import Server, action
from tools.clients.asked import Person
from tools.clients.openai_python import client

NAME = "outlines"


class Colour(Enum):
    red = "red"
    blue = "blue"


def over_openai(server: Server) -> Any:
    return outlines.from_openai(client(server), server.model)


def over_vllm(server: Server) -> Any:
    return outlines.from_vllm(client(server), server.model)


def over_sglang(server: Server) -> Any:
    return outlines.from_sglang(client(server), server.model)


@action(NAME, "openai: a text")
def text(server: Server) -> None:
    assert over_openai(server)("Say hello.", max_tokens=12)


@action(NAME, "openai: streamed")
def streamed(server: Server) -> None:
    assert "".join(over_openai(server).stream("Say hello.", max_tokens=12))


@action(NAME, "openai: a model", "bundled")
def model(server: Server) -> None:
    found = over_openai(server)("A person as JSON.", Person, max_tokens=200)
    assert Person.model_validate_json(found)


@action(NAME, "openai: a chat of several turns")
def chat(server: Server) -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    turns = outlines.inputs.Chat([system, user])
    assert over_openai(server)(turns, max_tokens=12)


@action(NAME, "vllm: a choice")
def choice(server: Server) -> None:
    assert over_vllm(server)("Which?", Literal["red", "blue"], max_tokens=12) in ("red", "blue")


@action(NAME, "vllm: an enumeration")
def enumeration(server: Server) -> None:
    assert over_vllm(server)("Which?", Colour, max_tokens=12) in ("red", "blue")


@action(NAME, "vllm: a number")
def number(server: Server) -> None:
    assert int(over_vllm(server)("How many?", int, max_tokens=12)) is not None


@action(NAME, "vllm: a regular expression")
def expression(server: Server) -> None:
    found = over_vllm(server)("A code", outlines.types.Regex(r"[A-Z]{3}-[0-9]{2}"), max_tokens=12)
    assert found[3] == "-" and len(found) == 6


@action(NAME, "vllm: a model", "bundled")
def vllm_model(server: Server) -> None:
    assert Person.model_validate_json(over_vllm(server)("A person.", Person, max_tokens=200))


@action(NAME, "vllm: a grammar")
def grammar(server: Server) -> None:
    lark = outlines.types.CFG('start: "yes" | "no"')
    assert over_vllm(server)("Well?", lark, max_tokens=12) in ("yes", "no")


@action(NAME, "sglang: a model", "bundled")
def sglang_model(server: Server) -> None:
    assert Person.model_validate_json(over_sglang(server)("A person.", Person, max_tokens=200))
