"""Starts a worker in place of llama-server, with its flags translated.

The suite of llama-server's own tests runs this as the binary. Flags that the worker lacks are
dropped, and their tests fail.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests import ROOT
from tests.support.worker import environment, installed

CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' + message.content"
    " + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""llama-server's default template for models without one; the worker refuses to guess."""

SAME = {
    "--host": "--host", "--port": "--port", "--threads": "--threads", "--parallel": "--slots",
    "--n-predict": "--max-tokens-out", "-ctk": "--kv-type-k", "-ctv": "--kv-type-v",
    "-fa": "--flash-attention", "--cors-origins": "--allow-origin",
}  # fmt: skip


def flags_of(given: list[str], models: Path, scratch: Path) -> list[str]:
    """Translate llama-server's flags into the worker's."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in (*SAME, "--model", "--hf-repo", "--hf-file", "--alias", "--lora"):
        parser.add_argument(name)
    for name in ("--ctx-size", "--batch-size", "--ubatch-size"):
        parser.add_argument(name, type=int)
    for name in ("--chat-template", "--chat-template-file", "--reasoning-format"):
        parser.add_argument(name)
    for name in ("--kv-unified", "--no-ui"):
        parser.add_argument(name, action="store_true")
    known, _ = parser.parse_known_args(given)
    values = vars(known)
    flags: list[str] = ["--log-level", "error"]
    for theirs, ours in SAME.items():
        if (value := values[theirs.lstrip("-").replace("-", "_")]) is not None:
            flags += [ours, value]
    if known.ctx_size and known.kv_unified:
        flags += ["--context-length", str(known.ctx_size), "--kv-cells", str(known.ctx_size)]
        flags.append("--kv-unified")
    elif known.ctx_size:
        flags += ["--context-length", str(known.ctx_size // int(known.parallel or 1))]
    if known.batch_size:
        micro = min(known.ubatch_size or 512, known.batch_size)
        flags += ["--batch", str(known.batch_size), "--micro-batch", str(micro)]
    flags += _model(known, models, scratch)
    if known.lora:
        flags += ["--lora", known.lora]
    if known.no_ui:
        flags.append("--no-page")
    if known.reasoning_format == "none":
        flags += ["--reasoning", "none"]
    return flags


def _model(known: argparse.Namespace, models: Path, scratch: Path) -> list[str]:
    """The file in `models` named like the hub's repository or file, else the bundled model."""
    wanted = known.model or known.hf_file or (known.hf_repo or "").rpartition("/")[2]
    stem = wanted.partition(":")[0].replace("/", "-").removesuffix(".gguf")
    found = models / f"{stem}.gguf"
    if not found.exists():
        return _template(known, scratch, default=None)
    link = scratch / f"{(known.alias or stem).partition(',')[0]}.gguf"
    if not link.exists():
        link.symlink_to(found)
    return ["--model", str(link), *_template(known, scratch, default=CHATML)]


def _template(known: argparse.Namespace, scratch: Path, default: str | None) -> list[str]:
    if known.chat_template_file:
        return ["--chat-template", known.chat_template_file]
    text = {None: default, "chatml": CHATML}.get(known.chat_template, known.chat_template)
    if text is None:
        return []
    file = scratch / f"{os.getpid()}.jinja"
    file.write_text(text, "utf-8")
    return ["--chat-template", str(file)]


def main() -> None:
    models, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    given = sys.argv[3:]
    command = [*installed(), *flags_of(given, models, scratch)]
    variables = environment(scratch / "cache")
    if "--api-key" in given:
        variables["LLORCH_WORKER_TOKEN"] = given[given.index("--api-key") + 1]
    os.execve(command[0], command, variables | {"PYTHONPATH": str(ROOT)})


if __name__ == "__main__":
    main()
