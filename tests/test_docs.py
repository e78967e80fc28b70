"""The commands, lists and links of the README and of docs/ are correct."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from builds import pins, sdist
from tests import ROOT
from tests.support.worker import WorkerProcess, installed
from tests.test_layout import name_of, parsed, sources
from tools import settings_page
from worker.api.app import DIALECTS
from worker.api.dialects.anthropic.schema import MessagesBody
from worker.api.dialects.llama_server import schema as llama_server
from worker.api.dialects.llama_server.rerank import RerankBody
from worker.api.dialects.llama_server.running import LookupBody
from worker.api.dialects.openai.embeddings import EmbeddingBody
from worker.api.dialects.openai.schema import ChatBody, CompletionBody
from worker.api.dialects.responses.schema import ResponsesBody
from worker.api.http import headers
from worker.api.http.page import pages
from worker.commands import convert
from worker.errors import WorkerError, flag
from worker.flags import _parser
from worker.observability.metrics import Metrics
from worker.setting_faults import ENV_ONLY
from worker.settings import FIELDS
from worker.wire.backends import BACKENDS

PAGES = [ROOT / "README.md", ROOT / "builds/README.md", *sorted(ROOT.glob("docs/*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text("utf-8") for page in PAGES}
README = TEXTS["README.md"]


def found_in_pages(pattern: str) -> list[tuple[str, str]]:
    """Return each match, with its page."""
    return [(p, each) for p, text in TEXTS.items() for each in re.findall(pattern, text, re.M)]


def section(page: str, heading: str) -> str:
    return TEXTS[page].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


OTHERS_FLAGS, _, OTHERS_FIELDS = TEXTS["docs/from-llama-server.md"].partition("\n## The fields of")
A_FLAG = r"(?<![\w-])--?[A-Za-z][\w.-]*"


def test_the_map_is_the_tree() -> None:
    rooms = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("worker/*/__init__.py")}
    found = re.findall(
        r"^\| `((?:worker/|builds)\w*)` \|", TEXTS["docs/architecture.md"], re.MULTILINE
    )
    assert sorted(found) == sorted({*rooms, "worker/assets", "builds"})


WAYS = ("One request, in order:", "One cancel, in order:", "| what is decided | where |")


@pytest.mark.parametrize("way", WAYS)
def test_a_way_leads_through_what_is_there(way: str) -> None:
    """Each step is a room, a file, or a method in one."""
    text = TEXTS["docs/architecture.md"].partition(way)[2]
    steps = re.findall(r"`([\w/.]+?)(?:/…)?`", text.partition("\n\n")[0])
    assert len(steps) > 8
    for step in steps:
        path, _, method = step.partition(".")
        room, file = ROOT / "worker" / path, ROOT / "worker" / f"{path}.py"
        sources = [each.read_text("utf-8") for each in (*room.glob("*.py"), file) if each.exists()]
        assert sources and (not method or any(f"def {method}(" in each for each in sources)), step


@pytest.mark.parametrize("page", [*TEXTS, "CONTRIBUTING.md", "worker/convert/README.md"])
def test_a_path_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    named = re.findall(r"`((?:worker|tests|tools|builds)/[\w/.*-]+?)(?:/…)?`", text)
    assert [path for path in named if not any(ROOT.glob(path))] == []


def test_the_readme_is_read_in_one_sitting() -> None:
    assert README.count("\n") <= 150


def test_pictures_are_there_and_small() -> None:
    sizes = {
        picture: ((ROOT / page).parent / "".join(picture)).stat().st_size
        for page, text in TEXTS.items()
        for picture in re.findall(r'(?:src|srcset)="([^"]+)"|!\[[^]]*\]\(([^)]+)\)', text)
    }
    assert sizes and max(sizes.values()) <= 60_000, sizes


@pytest.mark.parametrize("page", TEXTS)
def test_files_and_headings_that_a_page_links_to_exist(page: str) -> None:
    for link, anchor in re.findall(r"\]\(([^)#:]*)(#[\w-]+)?\)", TEXTS[page]):
        target = ((ROOT / page).parent / link).resolve() if link else ROOT / page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
            assert anchor[1:] in {_anchor(each) for each in headings}, anchor


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_each_page_of_docs_is_linked_from_the_readme() -> None:
    assert {f"docs/{each.name}" for each in ROOT.glob("docs/*.md")} <= set(
        re.findall(r"\]\(([^)#:]+)", README)
    )


def test_each_sentence_of_the_contract_has_its_test() -> None:
    rows = re.findall(r"^\| (?!what|a worker|---)(.+) \| (.+) \|$", TEXTS["docs/contract.md"], re.M)
    assert len(rows) > 60
    for sentence, tests in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", tests)
        assert named, sentence
        for file, name in named:
            source = (ROOT / "tests" / file).read_text("utf-8")
            assert re.search(rf"\bdef {name}\(", source), (file, name)


BLOCK = re.compile(r"(?:^ {4}.*\n)(?:(?:^ *\n)*^ {4}.*\n)*", re.MULTILINE)
"""Indented lines, and empty ones between them."""
OUR_ADDRESS = re.compile(r"127\.0\.0\.1:80[08]0")


def blocks() -> list[tuple[str, str]]:
    """Return the code blocks, each with its page."""
    return [
        (page, textwrap.dedent(block))
        for page, text in TEXTS.items()
        for block in BLOCK.findall(text)
    ]


CURLS = [
    (page, command)
    for page, block in blocks()
    for command in re.findall(r"^curl (?:\\\n|'[^']*'|[^'\n])*", block, re.MULTILINE)
]
PROGRAMS = [(page, block) for page, block in blocks() if "from openai import" in block]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("page", "command"), CURLS, ids=[page for page, _ in CURLS])
def test_a_curl_line_that_is_shown_is_answered(
    page: str, command: str, worker: WorkerProcess
) -> None:
    assert OUR_ADDRESS.search(command)
    here = OUR_ADDRESS.sub(f"127.0.0.1:{worker.port}", command)
    done = subprocess.run(
        ["sh", "-c", here.replace("curl ", "curl --silent --show-error --fail-with-body ", 1)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout, done.stdout + done.stderr
    assert '"error"' not in done.stdout


@pytest.mark.parametrize(("page", "program"), PROGRAMS, ids=[page for page, _ in PROGRAMS])
def test_a_program_that_is_shown_runs(page: str, program: str, worker: WorkerProcess) -> None:
    here = OUR_ADDRESS.sub(f"127.0.0.1:{worker.port}", program)
    done = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_messages_that_are_shown_are_taken(worker: WorkerProcess) -> None:
    shown = [json.loads(block) for _, block in blocks() if block.startswith('[{"role"')]
    assert shown
    for messages in shown:
        body = {"messages": messages, "max_tokens": 4}
        assert worker.post("/v1/chat/completions", body).status_code == 200


def test_the_exit_codes_that_are_listed_are_those_of_errors() -> None:
    """Plus those of a clean stop and of Ctrl-C; `--help` omits the latter."""
    rows = re.findall(r"^\| (\d+) \|", section("docs/operations.md", "Exit codes"), re.MULTILINE)
    listed = set(map(int, rows))
    assert listed == {0, 130, *(each.exit_code for each in WorkerError.__subclasses__())}
    epilog = (_parser("cpu", None).epilog or "").partition("exit codes:")[2]
    assert {*map(int, re.findall(r"\b(\d+) ", epilog))} == listed - {130}
    assert _parser("cpu", "plan").epilog == (_parser("cpu", "doctor").epilog or "").split(", 7 ")[0]
    epilog = (convert._parser().epilog or "").partition("exit codes:")[2]
    assert {*map(int, re.findall(r"\b(\d+) ", epilog))} == {0, 1, 2, 3, 4, 6, 130} <= listed


def test_a_stream_that_is_shown_is_what_comes(worker: WorkerProcess) -> None:
    """Except for the times and the number of cached tokens."""
    [shown] = [block for _, block in blocks() if block.startswith("event: started")]
    [body] = re.findall(r'`(\{"job_id":.*?\})`', TEXTS["docs/api.md"])
    come = worker.post("/execute", json.loads(body)).text
    events = [
        [json.loads(data) for data in re.findall(r"^data: (.*)$", text, re.MULTILINE)]
        for text in (shown, come)
    ]
    varying = ("started_at", "decode_time_ms", "cached_tokens")
    without = [[{k: v for k, v in e.items() if k not in varying} for e in each] for each in events]
    assert without[0] == without[1]


def test_each_header_of_ours_is_on_a_page() -> None:
    known = " ".join(TEXTS.values())
    for header in headers.ALL:
        if header.in_request or header.in_answer:
            assert f"`{header.name}" in known, header.name


def test_each_code_of_an_error_is_listed() -> None:
    """With its status if a request can cause it, and its exit code if a start can; errors only of
    llorch-ray are not a worker's."""
    every = WorkerError.__subclasses__()
    kinds = {each.code: each for each in every if each.__module__ == WorkerError.__module__}
    refusals = re.findall(
        r"^\| `([A-Z_]+)` \| (\d+) \| (yes|no) \|", TEXTS["docs/api.md"], re.MULTILINE
    )
    exits = re.findall(r"^\| (\d+) \| `([A-Z_]+)` \|", TEXTS["docs/operations.md"], re.MULTILINE)
    assert {each[0] for each in refusals} | {each[1] for each in exits} == set(kinds)
    for code, status, again in refusals:
        assert (int(status), again == "yes") == (kinds[code].status, kinds[code].retriable), code
    for number, code in exits:
        assert int(number) == kinds[code].exit_code, code


def test_metrics_that_are_named_exist() -> None:
    names = {each.name for each in Metrics("", n_adapters=1).registry.collect()}
    named = {name for _, name in found_in_pages(r"`((?:worker_|vllm:)\w+)`")}
    known = {name for name in named if name.removesuffix("_total") in names}
    assert known and named - known <= FIELDS.keys()


def test_each_loss_that_is_listed_was_measured() -> None:
    table, _, rest = TEXTS["docs/benchmarks.md"].partition("\n## ")[2].partition("\n## ")
    assert table.startswith("Where the worker loses")
    ratios = re.findall(r"\d+\.\d+", " ".join(re.findall(r"\| ([\d., ]+) \|", table)))
    assert len(ratios) > 10
    for ratio in ratios:
        assert re.search(rf"(?<![\d.]){re.escape(ratio)}(?!\d)", rest), ratio


def test_each_row_of_a_plan_is_explained(tmp_path: Path) -> None:
    flags = ["--json", "--draft", "tiny-model", "--kv-store", str(tmp_path)]
    done = subprocess.run([*installed(), "plan", *flags], capture_output=True, check=True)
    listed = re.findall(r"^\| (`.+?`) \|", TEXTS["docs/memory.md"], re.MULTILINE)
    parts = json.loads(done.stdout)["parts"]
    assert len(parts) > 6 and set(parts) <= set(re.findall(r"`(\w+)`", " ".join(listed)))


def test_messages_that_an_operator_sees_are_the_codes() -> None:
    """Messages quoted by the page of operations; `…` stands for variable parts."""
    quoted = re.findall(r'"([^"]+)"', section("docs/operations.md", "When something is wrong"))
    assert quoted
    texts = {
        node.value
        for path in sources()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    for part in (part.strip() for text in quoted for part in text.split("…")):
        assert any(part in each for each in texts), part


def test_the_programs_are_found() -> None:
    assert {"README.md", "docs/api.md", "docs/pool-and-fleet.md"} <= {page for page, _ in CURLS}
    assert {"README.md", "docs/api.md"} <= {page for page, _ in PROGRAMS}


def test_the_paths_that_need_no_token_are_listed() -> None:
    shown = section("docs/security.md", "Paths that need no token")
    table, _, others = shown.partition("All others need it")
    listed = {path.rstrip("/") or "/" for path in re.findall(r"`(/[\w/…]*)`", table)}
    every = [each for dialect in DIALECTS for each in dialect.operations]
    is_open = {each.path for each in every if each.probe or each.public}
    files = {each.path for dialect in pages() for each in dialect.operations}
    folders = tuple(path.removesuffix("/…") for path in listed if path.endswith("/…"))
    assert is_open | {path for path in files if not path.startswith(folders)} == {
        path for path in listed if not path.endswith("…")
    }
    assert all(any(path.startswith(folder) for path in files) for folder in folders)
    guarded = set(re.findall(r"`(/[\w/.]+)`", others.partition("Below")[0]))
    assert guarded and guarded <= {each.path for each in every} - is_open


def test_each_path_is_on_the_page_of_the_api() -> None:
    """By itself, after `/v1`, or before `/input_tokens`."""
    shown = section("docs/api.md", "Paths")
    named = set(re.findall(r"`(?:[A-Z]+ )?(/[^`]*)`", shown))
    assert "`/input_tokens`" in shown
    paths = {each.path for dialect in DIALECTS for each in dialect.operations}
    for path in paths:
        short = re.sub(r"/?\{.*", "", path).removesuffix("/input_tokens") or "/"
        assert {short, f"/v1{short}", f"{short}/", f"{short}/{{id}}"} & named, path


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for _, target in found_in_pages(r"(?:`|^ {4})make ([a-z-]+)")}
    assert named and named <= targets


def test_flags_that_the_worker_is_shown_with_exist() -> None:
    """In lines that call a command of the worker."""
    parsers = [_parser(name, command) for name in BACKENDS for command in (None, "plan")]
    flags = {name for parser in parsers for name in parser._option_string_actions}
    lines = found_in_pages(r"llorch-(?:cpu|cuda|vulkan|metal)\b(?! chat)[^\n|`]*")
    named = {
        (page, name)
        for page, line in lines
        for name in re.findall(r"(?<=\s)(--[a-z][\w-]+)", line.partition("#")[0])
    }
    assert named and {(page, name) for page, name in named if name not in flags} == set()


def test_the_page_of_settings_is_the_settings() -> None:
    made = settings_page.page()
    hint = "run: .venv/bin/python -m tools.settings_page"
    assert TEXTS["docs/settings.md"] == made, hint
    assert all(f"`{flag(name)}`" in made for name in FIELDS if name not in ENV_ONLY)
    assert "| `--host` | `127.0.0.1` |" in made and "| `--cuda-device` | `0` |" in made


def test_each_flag_of_llama_server_has_an_answer() -> None:
    """As declared in the sources that the wheel is built from."""
    source = (sdist.unpacked(pins.pins()) / "vendor/llama.cpp/common/arg.cpp").read_text("utf-8")
    source = re.sub(r"^\s*//.*$", "", source, flags=re.MULTILINE)
    declared: set[str] = set()
    for option in source.split("add_opt(common_arg(")[1:]:
        examples = re.search(r"set_examples\(\{([^}]*)\}", option)
        excludes = re.search(r"set_excludes\(\{([^}]*)\}", option)
        if examples and not re.search(r"EXAMPLE_(SERVER|COMMON)\b", examples[1]):
            continue
        if excludes and "EXAMPLE_SERVER" in excludes[1]:
            continue
        lists = re.match(r"\s*\{([^}]*)\}(?:,\s*\{([^}]*)\})?", option)
        assert lists is not None
        declared |= set(re.findall(r'"(-[^"]+)"', lists[0]))
    assert len(declared) > 300
    assert not declared - set(re.findall(A_FLAG, TEXTS["docs/from-llama-server.md"]))


def test_a_flag_of_llama_server_is_answered_with_what_the_page_says() -> None:
    parser, hints = _parser("cpu", None), dict[str, str]()
    for flags, answer in re.findall(r"^\| (`-.*?) \| (.*) \|$", OTHERS_FLAGS, re.MULTILINE):
        named = re.findall(r"`(--[a-z][\w-]*)|(the variable `\w+)", answer)
        for name in re.findall(A_FLAG, flags) if named else ():
            if name not in parser._option_string_actions:
                hints[name] = parser.hint(name)
                meant = hints[name].removeprefix("; did you mean ").removesuffix("?").split(" or ")
                assert {*meant} <= {"".join(each).replace("`", "") for each in named}, hints[name]
    assert len(hints) > 50


def test_a_flag_of_llama_server_that_is_none_here_is_not_taken_for_another() -> None:
    parser = _parser("cpu", None)
    known = {
        *parser._option_string_actions,
        *(each for n in parser.other_names.values() for each in n),
    }
    unknown = set(re.findall(A_FLAG, OTHERS_FLAGS)) - known
    assert len(unknown) > 200
    hints = {name: hint for name in unknown if "did you" in (hint := parser.hint(name))}
    assert hints == {}


INTERNAL = {"caps", "elem", "err", "error_data", "event_obj", "rank"}
"""Variables of llama-server's sources that do not hold a request."""


def test_each_field_of_llama_servers_routes_has_an_answer() -> None:
    """As its sources read them: in the schema of completions, and by name from bodies."""
    declared: set[str] = set()
    for path in (sdist.unpacked(pins.pins()) / "vendor/llama.cpp/tools/server").glob("*.cpp"):
        if path.name in ("server-models.cpp", "server-mcp.cpp", "server-tools.cpp"):
            continue  # several models and tools are deliberately not supported
        source = re.sub(r"//.*$", "", path.read_text("utf-8"), flags=re.MULTILINE)
        source = re.sub(r"^#if 0$.*?^#endif$", "", source, flags=re.MULTILINE | re.DOTALL)
        declared |= set(re.findall(r'(?:\(new field_\w+|add_alias)\("(\w+)"', source))
        if path.name not in ("server-task.cpp", "server-queue.cpp", "server-http.cpp"):
            read = r'(?:json_value\((\w+), *|\b(\w+)\.(?:at|contains|count)\()"(\w+)"'
            found = re.findall(read, source)
            declared |= {field for a, b, field in found if (a or b) not in INTERNAL}
    assert len(declared) > 140
    assert not declared - set(re.findall(r"`(\w+)`", OTHERS_FIELDS))


BODIES = (
    llama_server.CompletionBody, llama_server.InfillBody, llama_server.TokenizeBody,
    llama_server.DetokenizeBody, ChatBody, CompletionBody, EmbeddingBody, RerankBody, LookupBody,
    MessagesBody, ResponsesBody,
)  # fmt: skip


def test_a_field_that_is_said_to_be_the_same_is_one() -> None:
    """A field of the bodies that the routes read, by one of its names."""
    known: set[str] = set()
    for body in BODIES:
        known |= _properties(body.model_json_schema())
    rows = re.findall(r"^\| (`.*) \| the same\b.* \|$", OTHERS_FIELDS, re.MULTILINE)
    assert rows
    for row in rows:
        assert not set(re.findall(r"`(\w+)`", row)) - known, row


def _properties(schema: Any) -> set[str]:
    """Return all names of properties in a JSON schema, at any depth."""
    if isinstance(schema, list):
        return set().union(*map(_properties, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema.get("properties", ())).union(*map(_properties, schema.values()))


LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}


def _is_log_call(function: ast.expr) -> bool:
    """`log.info(…)`, or `write(…)` and `getattr(log, …)(…)` if the level is chosen before."""
    if isinstance(function, ast.Attribute):
        return function.attr in LEVELS
    if isinstance(function, ast.Call):
        return isinstance(function.func, ast.Name) and function.func.id == "getattr"
    return isinstance(function, ast.Name) and function.id == "write"


def test_the_page_lists_each_log_event_and_no_other() -> None:
    """Their names are an interface: `room.step`, in lower case."""
    logged: dict[str, str] = {}
    for path in sources():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and node.args and _is_log_call(node.func):
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    logged[first.value] = f"{name_of(path)}:{node.lineno}"
    form = r"[a-z_]+\.[a-z_]+"
    assert {name: at for name, at in logged.items() if not re.fullmatch(form, name)} == {}
    listed = re.findall(f"`({form})`", section("docs/operations.md", "Log events"))
    assert set(listed) == set(logged)
