"""instructor, which needs an older openai than the others."""

from __future__ import annotations

import instructor
from openai import OpenAI

from tools.clients.actions import Server, action
from tools.clients.asked import USER, City


def instructor_action(mode: str) -> None:
    @action("instructor", f"mode {mode}", "bundled")
    def run(server: Server) -> None:
        api = OpenAI(base_url=server.v1, api_key="any", max_retries=0, timeout=50)
        patched = instructor.from_openai(api, mode=instructor.Mode[mode])
        found = patched.chat.completions.create(
            model=server.model, messages=USER, response_model=City, max_tokens=200, max_retries=0
        )
        assert isinstance(found, City)


for _mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
    instructor_action(_mode)
