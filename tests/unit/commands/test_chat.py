"""What `chat` writes of an answer."""

from __future__ import annotations

import io
import json

import pytest
from rich.status import Status

from worker.commands.chat import Answer, print_json, take
from worker.commands.console import Console


def test_control_characters_and_markup_of_a_model_are_not_obeyed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither do `:words:` become emoji, nor brackets styles."""
    content = "[bold]a\x1b]52;c;aGk=\x07 \x9b2J\r:smile:b\n"
    console = Console(highlight=False, soft_wrap=True)
    chunk = {"choices": [{"delta": {"content": content}, "finish_reason": None}]}
    answer = Answer()
    take(chunk, answer, console, Status("waiting", console=console))
    assert capsys.readouterr().out == "[bold]a]52;c;aGk= 2J:smile:b\n" and answer.content == content


@pytest.mark.parametrize("encoding", ["utf-8", "iso-8859-1"])
def test_json_output_is_lossless_in_any_encoding(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding, errors="replace"))
    print_json(Answer("€ 日本"))
    assert json.loads(written.getvalue().decode(encoding))["content"] == "€ 日本"
