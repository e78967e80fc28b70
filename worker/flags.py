"""The command-line flags, built from the fields of the settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from worker.arguments import Parser
from worker.commands import EXIT_CODES, SUBCOMMANDS
from worker.errors import ConfigError, flag
from worker.expectations import closest
from worker.installation import own_version
from worker.setting_faults import ENV_ONLY, ENV_PREFIX
from worker.settings import BACKEND_FIELDS, FIELDS, group_of, is_switch, words_of
from worker.wire.backends import BackendName

GROUPS = {
    "model": "the model",
    "device": "the device",
    "engine": "the engine",
    "limits": "limits",
    "sampling": "sampling defaults (not for /execute and /v1/inference); without a flag, "
    "the model file's value applies, else llama.cpp's",
    "chat": "chat defaults, which requests can override",
    "server": "the server",
    "pool": "the pool manager",
}
_OTHER_NAMES = {
    "--model": ("-m", "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file"),
    "--lora": ("--lora-scaled", "--lora-init-without-apply"),
    "--draft": (
        *("-md", "--model-draft", "--spec-draft-model", "--speculative-model"),
        *("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"),
    ),
    "--mmproj": ("-mm", "--mmproj-auto"),
    "--no-mmproj": ("--no-mmproj-auto",),
    "--chat-template": ("--chat-template-file",),
    "--served-model-name": ("-a", "--alias"),
    "--kv-cells": ("-c", "--ctx-size"),
    "--max-tokens-out": ("-n", "--predict", "--n-predict"),
    "--context-length": ("-c", "--ctx-size", "--max-model-len"),
    "--slots": ("-np", "--parallel", "--max-num-seqs"),
    "--batch": ("-b", "--batch-size", "--max-num-batched-tokens"),
    "--micro-batch": ("-ub", "--ubatch-size"),
    "--n-gpu-layers": ("-ngl", "--ngl", "--gpu-layers"),
    "--threads": ("-t", "-tb", "--threads-batch"),
    "--mmap": ("-lm", "--load-mode"),
    "--speculate": ("--spec-type",),
    "--pooling": ("--embedding", "--embeddings", "--rerank", "--reranking"),
    "--flash-attention": ("-fa", "--flash-attn"),
    "--kv-type": ("--kv-cache-dtype",),
    "--kv-type-k": ("-ctk", "--cache-type-k"),
    "--kv-type-v": ("-ctv", "--cache-type-v"),
    "--kv-unified": ("-kvu", "-no-kvu", "--kv-unified-per-slot"),
    "--prefix-cache": ("--cache-prompt", "--enable-prefix-caching"),
    "--no-prefix-cache": ("--no-cache-prompt", "--no-enable-prefix-caching"),
    "--kv-store": ("--slot-save-path",),
    "--snapshot-mib": (
        *("-cram", "--cache-ram", "-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"),
        *("-cms", "--checkpoint-min-step", "--cache-idle-slots", "--no-cache-idle-slots"),
    ),
    "--yarn-orig-ctx": ("--yarn-orig-context",),
    "--control-vector": ("--control-vector-scaled",),
    "--ssl-certfile": ("--ssl-cert-file",),
    "--ssl-keyfile": ("--ssl-key-file",),
    "--temperature": ("--temp",),
    "--top-n-sigma": ("--top-nsigma",),
    "--typical-p": ("--typical",),
    "--repetition-penalty": ("--repeat-penalty",),
    "--mirostat-eta": ("--mirostat-lr",),
    "--mirostat-tau": ("--mirostat-ent",),
    "--dynatemp-exponent": ("--dynatemp-exp",),
    "--samplers": ("--sampling-seq", "--sampler-seq"),
    "--reasoning": ("-rea", "--reasoning-format"),
    "--chat-template-kwargs": ("--reasoning-preserve", "--no-reasoning-preserve"),
    "--slow-reader-timeout": ("-to", "--timeout"),
    "--keepalive": ("--sse-ping-interval",),
    "--allow-origin": ("--cors-origins",),
    "--page": ("--ui", "--webui"),
    "--no-page": ("--no-ui", "--no-webui"),
    "--log-level": ("-v", "--verbose", "-lv", "--verbosity", "--log-verbose", "--log-verbosity"),
    "--log-format": (
        *("--log-jsonl", "--no-log-jsonl", "--log-colors", "--log-prefix", "--no-log-prefix"),
        *("--log-timestamps", "--no-log-timestamps"),
    ),
    "--help": ("--usage", "--completion-bash"),
    "--version": ("-V",),
    "the variable HF_TOKEN": ("-hft", "--hf-token"),
    "the variable HF_HUB_OFFLINE": ("--offline",),
    "the subcommand doctor": ("-dev", "--device", "--list-devices"),
    f"the variable {ENV_PREFIX}WORKER_TOKEN": ("--api-key", "--worker-token"),
    "; leave it out: this is always on here.": (
        *("--jinja", "--metrics", "-cb", "--cont-batching", "--warmup"),
    ),
    "; it is a field of each request.": (
        *("-s", "--seed", "--ignore-eos", "-l", "--logit-bias", "-r", "--reverse-prompt"),
        *("--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file"),
        *("--dry-sequence-breaker", "--embd-normalize"),
    ),
}
"""As `Parser.other_names`: the flags of llama-server and vLLM."""


_NONE_FLAGS = frozenset({"mmproj"})
"""Settings with a `--no-` flag for the value `none`, as in other servers."""


class _Parser(Parser):
    """A parser whose errors are `ConfigError`s."""

    other_names = _OTHER_NAMES

    def hint(self, unknown: str) -> str:
        name = unknown[2:].replace("-", "_")
        if (owner := BACKEND_FIELDS.get(name)) and flag(name) not in self._option_string_actions:
            return f"; it is a flag of llorch-{owner}."
        return super().hint(unknown)

    def error(self, message: str) -> NoReturn:
        # argparse says "ignored" of a value that it refuses.
        ignored, refused = ": ignored explicit argument", " is a switch and takes no value, not"
        message = message.replace(ignored, refused)
        end = "" if message[-1] in ".?" else "."
        raise ConfigError(f"{message[0].upper()}{message[1:]}{end}")


def parse_flags(
    backend: BackendName, argv: Sequence[str], name: str | None = None
) -> dict[str, Any]:
    """The values of the given flags by setting, not parsed yet; `name` is a subcommand."""
    parser = _parser(backend, name)
    namespace, unknown = parser.parse_known_args(list(argv))
    if unknown:
        first = unknown[0]
        if first == "--":
            parser.error(f"-- ends the flags, and {parser.prog} takes nothing else; leave it out")
        before = ["", *argv][argv.index(first)]
        known = parser._option_string_actions.get(before)
        if known is not None and known.nargs == 0 and first not in SUBCOMMANDS:
            parser.error(f"{before} is a switch and takes no value, not {first!r}")
        what = f"{first!r} is not one of the subcommands {', '.join(SUBCOMMANDS)}"
        hint = closest(first, [*SUBCOMMANDS, "--help", "--version"])
        if first in SUBCOMMANDS:
            what, hint = f"A subcommand comes first: llorch-{backend} {first} …", "."
            if name:
                what = f"{name} is the subcommand already; {first} is one of its own"
        serves = "" if name else f"{parser.prog} serves without one, and "
        raise ConfigError(what + (hint or f"; {serves}a model is given as --model {unknown[-1]}."))
    given: dict[str, Any] = vars(namespace)
    return given


def _parser(backend: BackendName, name: str | None) -> _Parser:
    shown: Iterable[str] = GROUPS
    if name is None:
        lines = "".join(f"\n  {each:<10} {known.text}" for each, known in SUBCOMMANDS.items())
        usage = "%(prog)s [subcommand] [flags]"
        description = (
            "Serve one model on one device over HTTP. Without any flag, serve the bundled tiny "
            f"model on http://127.0.0.1:8080.\n\nsubcommands:{lines}"
        )
        faults = "1 a fault of the worker or a callback that failed"
        exit_codes = f"0 clean stop, {faults}, {EXIT_CODES}"
    else:
        text, shown, exit_codes, _ = SUBCOMMANDS[name]
        usage = "%(prog)s [flags]"
        description = (
            f"{text} It takes all flags of llorch-{backend}; "
            f"llorch-{backend} --help lists those that are not shown here."
        )
    parser = _Parser(
        prog=f"llorch-{backend}" + (f" {name}" if name else ""),
        usage=usage,
        description=description,
        epilog=f"Every flag has a variable: --max-body-bytes is {ENV_PREFIX}MAX_BODY_BYTES. "
        "Flags override variables, variables override the config file. Secrets are variables only: "
        + ", ".join(sorted(ENV_PREFIX + each.upper() for each in ENV_ONLY))
        + f".\nexit codes: {exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    version = f"%(prog)s {own_version()}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    if name:
        parser.add_argument("--json", action="store_true", help="print JSON")
    groups = {key: parser.add_argument_group(title) for key, title in GROUPS.items()}
    for field, info in FIELDS.items():
        if field not in ENV_ONLY and BACKEND_FIELDS.get(field, backend) == backend:
            _add_flag(groups[group_of(info)], field, info, is_shown=group_of(info) in shown)
    return parser


def _add_flag(
    group: argparse._ArgumentGroup, field: str, info: FieldInfo, *, is_shown: bool
) -> None:
    text = (info.description or "").replace("%", "%%")
    if default := shown_default(info):
        text += f" (default: {default})"
    text = text if is_shown else argparse.SUPPRESS
    if is_switch(info):
        group.add_argument(flag(field), action=argparse.BooleanOptionalAction, help=text)
        return
    if get_origin(info.annotation) is tuple:
        group.add_argument(flag(field), action="append", metavar=_metavar(field, info), help=text)
        return
    if any(get_origin(each) is tuple for each in get_args(info.annotation)):
        group.add_argument(flag(field), nargs="+", metavar="N", help=text)
        return
    words = words_of(info)
    metavar = "{" + ",".join(words) + "}" if words else _metavar(field, info)
    group.add_argument(flag(field), metavar=metavar, help=text)
    if field in _NONE_FLAGS:
        no = flag(field).replace("--", "--no-", 1)
        hidden = argparse.SUPPRESS
        group.add_argument(no, dest=field, action="store_const", const="none", help=hidden)


def shown_default(info: FieldInfo) -> str:
    """A setting's default as a user would write it; empty if it has none or an empty one."""
    value = info.default
    if value in (None, (), "") or value is PydanticUndefined:
        return ""
    if is_switch(info):
        return ("off", "on")[value]
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _metavar(field: str, info: FieldInfo) -> str:
    kinds = (info.annotation, *get_args(info.annotation))
    if any(kind is float or float in get_args(kind) for kind in kinds):
        return "SECONDS" if "seconds" in (info.description or "") else "NUMBER"
    if any(kind is int or int in get_args(kind) for kind in kinds):
        return "N"
    return field.rsplit("_", 1)[-1].upper()
