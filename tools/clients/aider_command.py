"""aider on a small repository: the protocol must complete; a small model's edits do not matter."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from tools.clients.actions import Server, action
from tools.clients.command_lines import ran


def asked(form: str, *flags: str) -> None:
    @action("aider", f"an edit in the form {form}")
    def run(server: Server) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
            (folder / "add.py").write_text("def add(a, b):\n    return a - b\n", "utf-8")
            model = f"openai/{server.model}"
            # A sentence is enough: aider reports an answer that was cut by its length as an error.
            settings = [{"name": model, "extra_params": {"max_tokens": 400, "stop": ["."]}}]
            (folder / "models.yml").write_text(json.dumps(settings), "utf-8")
            command = ["aider", "--model", model, "--edit-format", form, "add.py"]
            command += ["--model-settings-file", "models.yml", "--message", "Add, do not subtract."]
            off = ("check-update", "show-model-warnings", "pretty", "analytics", "auto-commits")
            command += ["--yes-always", "--map-tokens", "0", *(f"--no-{name}" for name in off)]
            base = {"OPENAI_API_BASE": server.v1, "OPENAI_API_KEY": "any"}
            text = ran([*command, *flags], folder, base)
            history = (folder / ".aider.chat.history.md").read_text("utf-8")
            assert "Tokens:" in history, text[-200:]
            assert "Error" not in history, history[-300:]


asked("whole")
asked("diff", "--no-stream")
asked("ask")
