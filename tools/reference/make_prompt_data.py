"""Makes `tests/data/prompts.json.xz`: each chat's prompt by each template, from the two references.

    python -m tools.reference.make_prompt_data        (or `make parity-data`)

llama-server of the pinned sources renders with `--jinja --chat-template-file`, transformers with
`render_jinja_template`. transformers gets arguments as objects and, if that makes a different
prompt, also as text, because its callers do either. Needs transformers, which nothing else does,
and builds llama-server (minutes, once); the data is committed.
"""

from __future__ import annotations

import json
import lzma
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from datetime import date
from pathlib import Path
from typing import Any

from transformers.utils import chat_template_utils  # type: ignore[import-not-found]

from builds.pins import pins
from tests.support.bundled import bundled_gguf
from tests.support.chats import CHATS, PROMPTS, SPECIAL, TEMPLATES, fixed_date
from tools.bench.peer_build import build_peers

START_S = 60.0


def by_transformers(source: str, chat: dict[str, Any]) -> list[str | None]:
    """Return the renderings with arguments as objects and as text, without duplicates."""
    texts = []
    for parses in (True, False):
        messages = json.loads(json.dumps(chat["messages"]))
        for message in messages:
            for call in message.get("tool_calls", ()) if parses else ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        try:
            (text,), _ = chat_template_utils.render_jinja_template(
                conversations=[messages],
                tools=chat.get("tools"),
                chat_template=source,
                add_generation_prompt=chat.get("add_generation_prompt", True),
                **SPECIAL,
                **chat.get("chat_template_kwargs", {}),
            )
        except Exception:  # whatever the error, transformers renders no prompt
            text = None
        if text not in texts:
            texts.append(text)
    return texts


def by_llama_server(program: str, model: Path, template: Path) -> dict[str, str | None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--model", str(model), "--port", str(port), "--ctx-size", "128"]
    command += ["--jinja", "--chat-template-file", str(template), "--threads", "1", "--no-warmup"]
    # llama-server removes a BOS from the prompt's beginning if it would add one itself.
    command += ["--override-kv", "tokenizer.ggml.add_bos_token=bool:false"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while _asked(port, "/health", None) is None:
            if server.poll() is not None or time.monotonic() > until:
                return dict.fromkeys(CHATS)  # llama-server cannot read this template
            time.sleep(0.1)
        answers = {name: _asked(port, "/apply-template", chat) for name, chat in CHATS.items()}
        return {name: answer and answer["prompt"] for name, answer in answers.items()}
    finally:
        server.terminate()
        server.wait()


def _asked(port: int, path: str, body: dict[str, Any] | None) -> Any:
    """Return the answer's body; `None` if there is none or it is an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data)
    try:
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return json.load(answer)
    except (urllib.error.HTTPError, OSError):
        return None


def main() -> None:
    day = date.today().isoformat()
    chat_template_utils.datetime = fixed_date(day)
    program = build_peers(pins(), os.cpu_count() or 1).program("llama-server")
    model = bundled_gguf("q8_0")
    data: dict[str, Any] = {"day": day, "llama-server": {}, "transformers": {}}
    for path in sorted(TEMPLATES.glob("*.jinja")):
        source = path.read_text()
        data["llama-server"][path.stem] = by_llama_server(program, model, path)
        data["transformers"][path.stem] = {
            name: by_transformers(source, chat) for name, chat in CHATS.items()
        }
        print(path.stem, sum(map(bool, data["llama-server"][path.stem].values())), flush=True)
    PROMPTS.write_bytes(lzma.compress(json.dumps(data, ensure_ascii=False).encode(), preset=9))


if __name__ == "__main__":
    main()
