"""Makes `tests/data/chat_templates.json`: what transformers renders of each template of the sdist.

    python -m tests.engine.make_template_data        (or `make parity-data`)

Needs transformers, which nothing else does; the data is committed. A rendering that transformers
refuses is `null`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.utils import chat_template_utils  # type: ignore[import-not-found]

from builds import sdist
from builds.pins import pins
from tests.engine.chats import CHATS, SPECIAL, FixedDate, fingerprint

TARGET = Path(__file__).parents[1] / "data/chat_templates.json"


def render(source: str, chat: dict[str, Any]) -> str | None:
    try:
        (text,), _ = chat_template_utils.render_jinja_template(
            conversations=[chat["messages"]],
            tools=chat.get("tools"),
            chat_template=source,
            add_generation_prompt=chat.get("add_generation_prompt", True),
            **SPECIAL,
            **chat.get("template_kwargs", {}),
        )
    except Exception:  # whatever it is, transformers gives no prompt
        return None
    return fingerprint(text)


def main() -> None:
    chat_template_utils.datetime = FixedDate
    folder = sdist.unpacked(pins()) / "vendor/llama.cpp/models/templates"
    data = {
        path.name: {name: render(path.read_text(), chat) for name, chat in CHATS.items()}
        for path in sorted(folder.glob("*.jinja"))
    }
    TARGET.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
