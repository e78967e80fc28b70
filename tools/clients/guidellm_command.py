"""guidellm, which benchmarks a server."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tools.clients.actions import Server, action
from tools.clients.command_lines import ran

TOKENIZER = Path(__file__).parents[2] / "worker/assets/tiny-model"


def measured(kind: str, *flags: str) -> None:
    @action("guidellm", f"a load of {kind} requests", "bundled")
    def run(server: Server) -> None:
        with tempfile.TemporaryDirectory() as name:
            report = Path(name) / "report.json"
            command = ["guidellm", "benchmark", "--target", server.url, "--model", server.model]
            command += ["--processor", str(TOKENIZER), "--data", "prompt_tokens=32,output_tokens=8"]
            command += ["--rate-type", kind, "--max-requests", "6", "--output-path", str(report)]
            ran([*command, "--disable-progress", *flags], Path(name))
            [found] = json.loads(report.read_text("utf-8"))["benchmarks"]
            counted = found["request_totals"]
            assert counted["successful"] == 6 and not counted["errored"], counted


measured("synchronous")
measured("concurrent", "--rate", "3")
