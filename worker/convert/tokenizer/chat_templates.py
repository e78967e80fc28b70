"""The chat templates of a checkpoint, by name; the main one is named `default`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gguf.constants import Keys

from worker.convert.checkpoint import Checkpoint
from worker.convert.family.rules import Metadata
from worker.errors import ModelError
from worker.models.checkpoint_files import TEMPLATES


def chat_templates(checkpoint: Checkpoint) -> dict[str, str]:
    """Template files override `tokenizer_config.json`."""
    found = _in_json(checkpoint, "tokenizer_config.json")
    file = checkpoint.folder / "chat_template.jinja"
    if file.is_file():
        found["default"] = _text(file)
    else:
        found |= _in_json(checkpoint, "chat_template.json")
    for path in sorted((checkpoint.folder / TEMPLATES).glob("*.jinja")):
        found[path.stem] = _text(path)
    return found


def _in_json(checkpoint: Checkpoint, name: str) -> dict[str, str]:
    """One template, or several by name: in one object, or in a list of objects."""
    value = checkpoint.json(name).get("chat_template")
    if isinstance(value, list):
        return {each["name"]: each["template"] for each in value}
    return {"default": value} if isinstance(value, str) else dict(value or {})


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path} is not UTF-8: byte {error.start} cannot be read", path=str(path)
        ) from None


def template_metadata(templates: Mapping[str, str]) -> Metadata:
    """The templates under the keys of the `gguf` package. Its own function would list their names
    in a different order in each process."""
    named = {re.sub("[^A-Za-z0-9]", "_", name): text for name, text in templates.items() if name}
    default = named.pop("default", "")
    found: Metadata = {Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=n): t for n, t in named.items()}
    return found | {Keys.Tokenizer.CHAT_TEMPLATES: [*named], Keys.Tokenizer.CHAT_TEMPLATE: default}
