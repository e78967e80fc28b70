"""`python -m tools.settings_page` writes docs/settings.md from the settings themselves."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic.fields import FieldInfo

from worker.errors import flag
from worker.flags import GROUPS, shown_default
from worker.setting_faults import ENV_ONLY, variable_of
from worker.settings import BACKEND_FIELDS, FIELDS, group_of, words_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
HEAD = """\
# Settings

Each setting is a flag, a variable and a key of the TOML file that `--config` names:
`--max-queued-requests 64` is the same as `LLORCH_MAX_QUEUED_REQUESTS=64` and
`max_queued_requests = 64`. Flags override variables, and variables override the file. An unknown
setting or a value out of range stops the start with a message that names it. `MODEL_PATH` is read
as `LLORCH_MODEL`, `BIND_ADDR` (HOST:PORT) as `LLORCH_HOST` and `LLORCH_PORT`, and `CUDA_DEVICE` as
`LLORCH_CUDA_DEVICE`, unless these are set.

- A switch is set by `--page` or `--no-page`, `LLORCH_PAGE=off` or `page = false`. The worker
  chooses the switches without a default, `--mmap` and `--kv-unified`.
- If a row ends with a list of values, the setting takes one of them, in any case: `--blas on`.
- A repeatable setting is a list in the file, `lora = ["sql=sql.gguf", "law=./folder:0.8"]`, and
  separated by commas in a variable, `LLORCH_ALLOW_HOST=a.example,b.example`.
- Tokens can only be set by variables. An empty variable counts as unset.

`.venv/bin/python -m tools.settings_page` writes this page; a test compares it.
"""


def page() -> str:
    parts = [HEAD]
    for key, title in GROUPS.items():
        rows = [
            f"| {_name(field)} | {_default(info)} | {_text(field, info)} |"
            for field, info in FIELDS.items()
            if group_of(info) == key
        ]
        heading = title.removeprefix("the ").capitalize()
        parts.append(f"## {heading}\n\n| setting | default | |\n| --- | --- | --- |\n")
        parts[-1] += "\n".join(rows) + "\n"
    return "\n".join(parts)


def _name(field: str) -> str:
    return f"`{variable_of(field)}`" if field in ENV_ONLY else f"`{flag(field)}`"


def _default(info: FieldInfo) -> str:
    default = shown_default(info)
    return default and f"`{default}`"


def _text(field: str, info: FieldInfo) -> str:
    text = info.description or ""
    if choices := [f"`{word}`" for word in words_of(info)]:
        text += f" ({', '.join(choices)})"
    if field in BACKEND_FIELDS:
        text += f" (`llorch-{BACKEND_FIELDS[field]}` only)"
    return re.sub(r"(?<!\\)\|", r"\\|", text)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
