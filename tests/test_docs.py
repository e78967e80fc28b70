"""What the pages of docs/ and the README show, list and link to is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from builds import pins, sdist
from tools import settings_page
from worker.api.dialects.anthropic.schema import MessagesBody
from worker.api.dialects.llama_server import schema as llama_server
from worker.api.dialects.llama_server.rerank import RerankBody
from worker.api.dialects.llama_server.running import LookupBody
from worker.api.dialects.openai.embeddings import EmbeddingBody
from worker.api.dialects.openai.schema import ChatBody, CompletionBody
from worker.api.dialects.responses.schema import ResponsesBody
from worker.flags import _OTHER_NAMES, _flag_hint, _parser
from worker.setting_faults import ENV_ONLY, flag
from worker.settings import FIELDS
from worker.wire.backends import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "builds/README.md", *sorted(ROOT.glob("docs/*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text("utf-8") for page in PAGES}
README = TEXTS["README.md"]


def test_the_map_is_the_tree() -> None:
    rooms = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("worker/*/__init__.py")}
    found = re.findall(
        r"^\| `((?:worker/|builds)\w*)` \|", TEXTS["docs/architecture.md"], re.MULTILINE
    )
    assert sorted(found) == sorted({*rooms, "worker/assets", "builds"})


def test_the_readme_is_read_in_one_sitting() -> None:
    assert README.count("\n") <= 150


def test_pictures_are_there_and_small() -> None:
    for page, text in TEXTS.items():
        for picture in re.findall(r'(?:src|srcset)="([^"]+)"|!\[[^]]*\]\(([^)]+)\)', text):
            path = (ROOT / page).parent / "".join(picture)
            assert path.stat().st_size <= 60_000, picture


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


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page, text in TEXTS.items():
        for target in re.findall(r"(?:`|^ {4})make ([a-z-]+)", text, re.MULTILINE):
            assert target in targets, (page, target)


def test_flags_that_the_worker_is_shown_with_exist() -> None:
    """In lines that call a command of the worker, and in settings that stand in code by
    themselves."""
    ours = {each for name in BACKENDS for each in _parser(name, None)._option_string_actions}
    ours |= {each for name in BACKENDS for each in _parser(name, "plan")._option_string_actions}
    for page, text in TEXTS.items():
        for line in re.findall(r"llorch-(?:cpu|cuda|vulkan|metal)\b(?! chat)[^\n|`]*", text):
            for name in re.findall(r"(?<=\s)(--[a-z][\w-]+)", line.partition("#")[0]):
                assert name in ours, (page, name)


def test_the_page_of_settings_is_the_settings() -> None:
    made = settings_page.page()
    hint = "run: .venv/bin/python -m tools.settings_page"
    assert TEXTS["docs/settings.md"] == made, hint
    assert all(f"`{flag(name)}`" in made for name in FIELDS if name not in ENV_ONLY)
    assert "| `--host` | `127.0.0.1` |" in made and "| `--cuda-device` | `0` |" in made


def test_each_flag_of_llama_server_has_an_answer() -> None:
    """As the sources that the wheel is built from declare them."""
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
    named = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w.-]*", TEXTS["docs/from-llama-server.md"]))
    assert not declared - named


def test_a_flag_of_llama_server_is_answered_with_what_the_page_says() -> None:
    table = TEXTS["docs/from-llama-server.md"].partition("## The fields of its routes")[0]
    parser = _parser("cpu", None)
    for theirs, ours in re.findall(r"^\| (`-.*?) \| (.*) \|$", table, re.MULTILINE):
        answers = re.findall(r"`(--[a-z][\w-]*)|(the variable `\w+)", ours)
        for name in re.findall(r"(?<![\w-])--?[A-Za-z][\w.-]*", theirs):
            if answers and name not in parser._option_string_actions:
                hint = _flag_hint(name, parser)
                told = hint.removeprefix("; did you mean ").removesuffix("?").split(" or ")
                said = {"".join(each).replace("`", "") for each in answers}
                assert set(told) <= said, (name, hint)


def test_a_flag_of_llama_server_that_is_none_here_is_not_taken_for_another() -> None:
    page = TEXTS["docs/from-llama-server.md"].partition("## The fields of its routes")[0]
    parser = _parser("cpu", None)
    known = {*parser._option_string_actions, *(each for n in _OTHER_NAMES.values() for each in n)}
    unknown = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w.-]*", page)) - known
    assert len(unknown) > 200
    hints = {name: hint for name in unknown if "did you" in (hint := _flag_hint(name, parser))}
    assert hints == {}


INTERNAL = {"caps", "elem", "err", "error_data", "event_obj", "rank"}
"""Variables of llama-server that hold no request."""


def test_each_field_of_llama_servers_routes_has_an_answer() -> None:
    """As its sources read them: in the schema of completions, and by name out of bodies."""
    declared: set[str] = set()
    for path in (sdist.unpacked(pins.pins()) / "vendor/llama.cpp/tools/server").glob("*.cpp"):
        if path.name in ("server-models.cpp", "server-mcp.cpp", "server-tools.cpp"):
            continue  # of several models, and of tools: by decision not
        source = re.sub(r"//.*$", "", path.read_text("utf-8"), flags=re.MULTILINE)
        source = re.sub(r"^#if 0$.*?^#endif$", "", source, flags=re.MULTILINE | re.DOTALL)
        declared |= set(re.findall(r'(?:\(new field_\w+|add_alias)\("(\w+)"', source))
        if path.name not in ("server-task.cpp", "server-queue.cpp", "server-http.cpp"):
            read = r'(?:json_value\((\w+), *|\b(\w+)\.(?:at|contains|count)\()"(\w+)"'
            found = re.findall(read, source)
            declared |= {field for a, b, field in found if (a or b) not in INTERNAL}
    assert len(declared) > 140
    _, _, section = TEXTS["docs/from-llama-server.md"].partition("## The fields of its routes")
    missing = declared - set(re.findall(r"`(\w+)`", section))
    assert not missing


BODIES = (
    llama_server.CompletionBody, llama_server.InfillBody, llama_server.TokenizeBody,
    llama_server.DetokenizeBody, ChatBody, CompletionBody, EmbeddingBody, RerankBody, LookupBody,
    MessagesBody, ResponsesBody,
)  # fmt: skip


def test_a_field_that_is_said_to_be_the_same_is_one() -> None:
    """Of the bodies that the routes read, by name or another of its names."""
    known: set[str] = set()
    for body in BODIES:
        known |= _properties(body.model_json_schema())
    _, _, section = TEXTS["docs/from-llama-server.md"].partition("## The fields of its routes")
    for theirs, ours in re.findall(r"^\| (`.*) \| the same\b.* \|$()", section, re.MULTILINE):
        assert not set(re.findall(r"`(\w+)`", theirs)) - known, ours


def _properties(schema: Any) -> set[str]:
    """All names of properties in a JSON schema, however deep."""
    if isinstance(schema, list):
        return set().union(*map(_properties, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema.get("properties", ())).union(*map(_properties, schema.values()))
