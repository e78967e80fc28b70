"""The commands `llorch-cpu`, `llorch-cuda`, `llorch-metal` and `llorch-accelerate`.

Owns the flags, the subcommands and the way a failure is told: one JSON log line, one sentence on
stderr and the contract's exit code. Runs on the main thread; heavy modules are imported only once
the flags are known to be right.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from worker.devices.cpu import instructions
from worker.errors import ConfigError, WorkerError
from worker.observability import logs
from worker.setting_faults import ENV_ONLY, ENV_PREFIX, closest, flag
from worker.settings import BACKEND_FIELDS, FIELDS, Settings
from worker.wire.engine_settings import BackendName

Subcommand = Callable[[Settings, bool], int]
"""(settings, whether JSON is wanted) → exit code."""

_GROUPS = {
    "model": "the model",
    "device": "the device",
    "engine": "the engine",
    "limits": "limits",
    "server": "the server",
    "pool": "the pool manager",
}
_EXIT_CODES = (
    "exit codes: 0 clean stop, 2 usage or config, 3 model, 4 backend or device mismatch, "
    "5 does not fit the device, 6 download, 7 port in use, 8 engine crash loop"
)


def cpu() -> NoReturn:
    sys.exit(main("cpu", sys.argv[1:]))


def cuda() -> NoReturn:
    sys.exit(main("cuda", sys.argv[1:]))


def metal() -> NoReturn:
    sys.exit(main("metal", sys.argv[1:]))


def accelerate() -> NoReturn:
    sys.exit(main("accelerate", sys.argv[1:]))


def main(backend: BackendName, argv: Sequence[str]) -> int:
    """Run one command to its end; returns the exit code."""
    _open_standard_files()
    logs.configure()
    name = argv[0] if argv and argv[0] in _SUBCOMMANDS else None
    run = _SUBCOMMANDS[name][0] if name else _serve
    try:
        instructions.check()  # before NumPy, which dies of SIGILL where this raises
        flags = parse_flags(backend, argv[1:] if name else argv, name)
        as_json = bool(flags.pop("json", False))
        settings = Settings.load(backend, flags)
        logs.configure(settings.log_level, settings.log_format, settings.worker_id)
        return run(settings, as_json)
    except WorkerError as error:
        return _report(f"llorch-{backend}", error)
    except KeyboardInterrupt:
        return 0
    except Exception as error:  # a fault of ours; the log has the trace, the user a sentence
        logs.get_logger().error("worker.bug", exc_info=error)
        return _report(
            f"llorch-{backend}", WorkerError(f"Unexpected {type(error).__name__}: {error}")
        )


def _open_standard_files() -> None:
    """A supervisor may start us with some of them closed; the next socket would take the place."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(number, True)  # the engine process logs there too
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)


def _report(command: str, error: WorkerError) -> int:
    """The one place where an error becomes a log line, a sentence and an exit code."""
    known = {"code": error.code, "message": error.message, "exit_code": error.exit_code}
    details = {key: value for key, value in error.details.items() if key not in ("errors", "event")}
    logs.get_logger().error("worker.failed", **(details | known))
    with contextlib.suppress(OSError):  # nobody reads any more; the exit code still tells
        print(f"{command}: {error.message}", file=sys.stderr, flush=True)
    return error.exit_code


def _serve(settings: Settings, as_json: bool) -> int:
    from worker.supervisor.engine_process import begin_engine

    with begin_engine() as begun:  # its imports take as long as ours
        from worker.lifecycle import run

        run(settings, begun)
    return 0


def _plan(settings: Settings, as_json: bool) -> int:
    from worker.commands import plan

    return plan.run(settings, as_json=as_json)


def _bench(settings: Settings, as_json: bool) -> int:
    from worker.commands import bench

    return bench.run(settings, as_json=as_json)


def _doctor(settings: Settings, as_json: bool) -> int:
    from worker.commands import doctor

    return doctor.run(settings, as_json=as_json)


_SUBCOMMANDS: Mapping[str, tuple[Subcommand, str]] = {
    "plan": (_plan, "Print what the model would take of the device's memory; load nothing."),
    "bench": (_bench, "Measure what this machine gives with this model, at 1, 4 and 16 streams."),
    "doctor": (_doctor, "Look at everything that a start needs; exit 0 if it would succeed."),
}
"""Name → what it runs and its line in `--help`; each takes all the flags."""


# --- flags -------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are `ConfigError`s."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message[0].upper() + message[1:] + ".")


def parse_flags(
    backend: BackendName, argv: Sequence[str], name: str | None = None
) -> dict[str, Any]:
    """The flags that were given, as strings under their setting's name; `name` is a subcommand."""
    parser = _parser(backend, name)
    namespace, unknown = parser.parse_known_args(list(argv))
    given = vars(namespace)
    if unknown:
        known = [option for option in parser._option_string_actions if option.startswith("--")]
        first = unknown[0].split("=")[0]
        if first.startswith("-"):
            raise ConfigError(
                f"{first} is not a flag of llorch-{backend}{closest(first, known)}", field=first
            )
        raise ConfigError(
            f"{first!r} is neither a flag nor its value, nor one of the subcommands "
            f"{', '.join(_SUBCOMMANDS)}.",
            field=first,
        )
    return given


def _parser(backend: BackendName, name: str | None) -> _Parser:
    lines = "".join(f"\n  {each:<10} {text}" for each, (_, text) in _SUBCOMMANDS.items())
    parser = _Parser(
        prog=f"llorch-{backend}" + (f" {name}" if name else ""),
        usage="%(prog)s [flags]",
        description=_SUBCOMMANDS[name][1]
        if name
        else "Serve one model on one device over HTTP. Without any flag: the bundled tiny model "
        f"on http://127.0.0.1:8080.\n\nsubcommands:{lines}",
        epilog=f"Every flag has a variable: --max-body-bytes is {ENV_PREFIX}MAX_BODY_BYTES. "
        "Flags win over variables, variables over the config file. Secrets are variables only: "
        + ", ".join(sorted(ENV_PREFIX + each.upper() for each in ENV_ONLY))
        + f".\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    if name:
        parser.add_argument("--json", action="store_true", help="print JSON")
    groups = {key: parser.add_argument_group(title) for key, title in _GROUPS.items()}
    for field, info in FIELDS.items():
        extra = info.json_schema_extra
        group = str(extra.get("group", "")) if isinstance(extra, dict) else ""
        if group in groups and field not in ENV_ONLY:
            if BACKEND_FIELDS.get(field, backend) == backend:
                _add_flag(groups[group], field, info)
    return parser


def _add_flag(group: argparse._ArgumentGroup, field: str, info: FieldInfo) -> None:
    text = (info.description or "").replace("%", "%%")
    if info.default not in (None, ()) and info.default is not PydanticUndefined:
        shown = {True: "on", False: "off"}.get(info.default, info.default)
        text += f" (default: {shown})"
    if info.annotation is bool or bool in get_args(info.annotation):
        group.add_argument(flag(field), action=argparse.BooleanOptionalAction, help=text)
        return
    if get_origin(info.annotation) is tuple:
        group.add_argument(flag(field), action="append", metavar=_metavar(field, info), help=text)
        return
    choices = [each for each in get_args(info.annotation) if isinstance(each, str)]
    metavar = "{" + ",".join(choices) + "}" if choices else _metavar(field, info)
    group.add_argument(flag(field), metavar=metavar, help=text)


def _metavar(field: str, info: FieldInfo) -> str:
    kinds = (info.annotation, *get_args(info.annotation))
    if any(kind is float for kind in kinds):
        return "SECONDS"
    if any(kind is int or int in get_args(kind) for kind in kinds):
        return "N"
    return field.rsplit("_", 1)[-1].upper()


if __name__ == "__main__":
    cpu()
