"""Chooses the model's chat template: its own, or the operator's. Runs during the start."""

from __future__ import annotations

import os
import stat

from worker.engine.text.chat_template import MAX_SOURCE_CHARS, ChatTemplate
from worker.errors import ConfigError
from worker.llama.model import Model


def template_of(model: Model, file: str | None) -> ChatTemplate | None:
    """The template to serve with; `None` if there is none.

    Raises:
        ConfigError: the operator's file cannot be read.
        ModelError: the template is not valid, or too long.
    """
    source, tool_use = model.chat_template(), model.chat_template("tool_use")
    if file is not None:
        source, tool_use = _read(file), None
    if source is None:
        return None
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}
    names |= {"unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
    special = {}
    for name, key in names.items():
        token = model.metadata(f"tokenizer.ggml.{key}")
        special[name] = model.token_text(int(token)) if token is not None else ""
    return ChatTemplate(source, special, tool_use)


def _read(file: str) -> str:
    try:
        # A pipe would be waited for, and a device read without an end.
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise OSError(0, "it is not a file")
        with open(file, encoding="utf-8") as opened:
            return opened.read(MAX_SOURCE_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"--chat-template is {file!r}, which cannot be read: {reason}.", field="chat_template"
        ) from None


def template_metadata(template: ChatTemplate | None) -> dict[str, str]:
    """The template in use as metadata, which replaces that of the file."""
    return {"tokenizer.chat_template": template.source} if template is not None else {}
