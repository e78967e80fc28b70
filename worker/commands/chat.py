"""`llorch-cpu chat`: a conversation in the terminal.

Talks to the worker that listens at --host and --port. If a model is given, or nothing listens
there, it starts its own worker with the same settings and ends it afterwards. Runs on the main
thread.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.status import Status

from worker.cli import stop_signals
from worker.commands.console import Console
from worker.commands.served import (
    CONNECT_SECONDS,
    answer_of,
    client_of,
    disconnected,
    headers_of,
    no_worker_at,
    own_worker,
)
from worker.errors import WorkerError, escaped
from worker.settings import Settings

_HELP = "/clear forgets the conversation, /system TEXT sets the system prompt, Ctrl-D leaves"
_CONTROL_CHARACTERS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})
"""Those that a terminal would obey if a model wrote them; used with `str.translate`."""


@dataclass(slots=True)
class Answer:
    """The part of an answer that has arrived so far."""

    content: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def pace(self) -> str:
        times = self.timings
        if not times:
            return ""
        return (
            f"{times['predicted_n']} tokens, {times['predicted_per_second']:.1f} tokens/s; "
            f"prompt tokens: {times['prompt_n']} computed, {times['cache_n']} cached"
        )


@dataclass(slots=True)
class _Conversation:
    """The conversation with the worker's model. Messages without an answer are not part of it."""

    client: httpx.Client
    model: str
    console: Console
    as_json: bool
    is_typed: bool
    """Whether a person types. Then a line that looks like a command is not sent to the model."""
    messages: list[dict[str, str]] = field(default_factory=list)

    def enter(self, line: str) -> None:
        """Run a command, or send the line. Raises `WorkerError` if there is no answer."""
        if line == "/clear":
            self.messages = []
        elif line.startswith("/system "):
            self.messages = [{"role": "system", "content": line.removeprefix("/system ")}]
        elif self.is_typed and line.startswith("/") and " " not in line:
            self.console.print(_HELP, style="dim")
        elif line:
            messages = [*self.messages, {"role": "user", "content": line}]
            answer = self._answer_to(messages)
            self.messages = [*messages, {"role": "assistant", "content": answer.content}]

    def _answer_to(self, messages: list[dict[str, str]]) -> Answer:
        """Print the answer as it arrives, or as JSON once it is complete; Ctrl-C stops it."""
        body = {"model": self.model, "messages": messages, "stream": True, "return_progress": True}
        answer, console = Answer(), None if self.as_json else self.console
        waiting = Status("waiting", console=console or Console(quiet=True))
        try:
            with waiting, self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    response.read()
                    raise WorkerError(_message(response.text))
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        take(json.loads(line.removeprefix("data: ")), answer, console, waiting)
        except httpx.HTTPError as error:
            raise disconnected(error) from error
        except KeyboardInterrupt:  # closing the stream cancels the request
            answer.finish_reason = "stopped"
        if console is None:
            print_json(answer)
        else:
            console.print(f"\n{answer.pace or answer.finish_reason or ''}", style="dim")
        return answer


def run(settings: Settings, *, as_json: bool) -> int:
    """Talk until the input ends. With `as_json`, each answer is one line of JSON.

    Raises:
        WorkerError: there is no worker to talk to, or its model cannot chat.
    """
    for each in set(stop_signals()) - {signal.SIGINT}:
        signal.signal(each, signal.SIG_DFL)  # unlike Ctrl-C, they do not end only an answer
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    is_asked = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
    with _worker(settings) as client:
        talk = _Conversation(client, _model_of(client), console, as_json, is_asked)
        if is_asked:
            # It adds line editing and a history, and lets several lines be pasted as one message.
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401
            console.print(escaped(talk.model), style="bold dim", end="")
            console.print(f" at {client.base_url}; {_HELP}", style="dim")
        while True:
            try:
                talk.enter(input(">>> " if is_asked else "").strip())
            except EOFError:
                return 0
            except WorkerError as error:
                if not is_asked:
                    raise
                console.print(f"\n{escaped(error.message)}", style="red")
            except KeyboardInterrupt:  # at the prompt, it discards the line
                if not is_asked:
                    raise
                console.print()


@contextlib.contextmanager
def _worker(settings: Settings) -> Iterator[httpx.Client]:
    """A client of the worker to talk to, which is started first if necessary."""
    with client_of(settings) as found:
        if settings.model is None and _listens(found):
            yield found
            return
    with own_worker(settings, n_slots=1) as (url, _):
        with httpx.Client(base_url=url, headers=headers_of(settings), trust_env=False) as started:
            started.timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
            yield started


def _listens(client: httpx.Client) -> bool:
    try:
        return answer_of(client, "/health", CONNECT_SECONDS)[0] == httpx.codes.OK
    except (httpx.HTTPError, UnicodeError):  # the latter for an invalid host name
        return False


def _model_of(client: httpx.Client) -> str:
    """The name of the worker's model.

    Raises:
        WorkerError: the worker does not return it, for example because it needs another token.
    """
    try:
        status, text = answer_of(client, "/v1/models", CONNECT_SECONDS)
    except httpx.HTTPError as error:
        raise disconnected(error) from error
    if status == httpx.codes.UNAUTHORIZED:
        raise WorkerError("The worker requires a token or key; set LLORCH_WORKER_TOKEN to it.")
    if status != httpx.codes.OK:
        raise WorkerError(_message(text))
    with no_worker_at(client.base_url):
        return str(json.loads(text)["data"][0]["id"])


def take(chunk: dict[str, Any], answer: Answer, console: Console | None, waiting: Status) -> None:
    if "error" in chunk:
        raise WorkerError(str(chunk["error"]["message"]))
    if progress := chunk.get("prompt_progress"):
        share = 100 * progress["processed"] / max(progress["total"], 1)
        waiting.update(f"prompt, {share:.0f} %")
    answer.timings = chunk.get("timings", answer.timings)
    for choice in chunk["choices"]:
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        reasoning = choice["delta"].get("reasoning_content") or ""
        content = choice["delta"].get("content") or ""
        if console is not None and (reasoning or content):
            waiting.stop()
            if content and answer.reasoning and not answer.content:
                console.print("\n")
            shown = reasoning.translate(_CONTROL_CHARACTERS)
            console.out(shown, end="", style="dim italic")
            console.out(content.translate(_CONTROL_CHARACTERS), end="")
        answer.reasoning += reasoning
        answer.content += content


def print_json(answer: Answer) -> None:
    """Print one line; escape characters if stdout's encoding is not UTF-8 and may lack them."""
    shown: dict[str, Any] = {"content": answer.content}
    if answer.reasoning:
        shown["reasoning_content"] = answer.reasoning
    shown |= {"finish_reason": answer.finish_reason, "timings": answer.timings}
    print(json.dumps(shown, ensure_ascii=sys.stdout.encoding != "utf-8"), flush=True)


def _message(text: str) -> str:
    """The message in an error's body, or else the whole body."""
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        return str(json.loads(text)["error"]["message"])
    return text or "The worker gave no answer."
