"""`llorch-convert` with every form of reference, against a local hub."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from huggingface_hub import constants
from pydantic import TypeAdapter

from tests.conftest import StartWorker
from tests.support.hub_server import COMMIT, OTHER_COMMIT, Hub, Repo
from tests.unit.convert.conftest import _check_here
from worker.api.dialects.native.answers import Info
from worker.commands import convert as cli
from worker.convert import manifest
from worker.errors import ModelError
from worker.installation import own_version
from worker.models.gguf.header import read_header
from worker.models.reference import name_of
from worker.models.resolve import bundled_folder, resolve_checkpoint

__all__ = ["_check_here"]
FILES = {p.name: p.read_bytes() for p in bundled_folder().iterdir() if p.is_file()}
ALIASES = f"""
[models.mine]
repo = "o/tiny"
revision = "{COMMIT}"
[models.here]
path = "checkpoint"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Path:
    """A working folder with a checkpoint and a registry; the hub holds the same checkpoint."""
    (tmp_path / "checkpoint").symlink_to(bundled_folder())
    (tmp_path / "models.toml").write_text(ALIASES)
    hub.repos["o/tiny"] = Repo(dict(FILES), branches={"main": COMMIT, "v2": COMMIT})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLORCH_CACHE_DIR", "cache")
    return tmp_path


def found(ref: str) -> Path:
    return asyncio.run(resolve_checkpoint(ref, None, Path("cache")))


def converted(ref: str) -> dict[str, object]:
    """Convert, and return the manifest."""
    assert cli.run([ref, "out.gguf", "--overwrite", "--progress", "none"]) == 0
    metadata = read_header("out.gguf").metadata
    return {key: value for key, value in metadata.items() if key.startswith("llorch.convert.")}


@pytest.mark.parametrize(
    ("ref", "source", "revision"),
    [
        ("checkpoint", "checkpoint", None),
        ("./checkpoint", "checkpoint", None),
        ("here", "checkpoint", None),
        ("tiny-model", "tiny-model", None),
        ("mine", "o/tiny", COMMIT),
        ("hf:o/tiny", "o/tiny", COMMIT),
        ("hf:o/tiny@v2", "o/tiny", COMMIT),
        (f"hf:o/tiny@{COMMIT}", "o/tiny", COMMIT),
    ],
)
def test_each_form_of_reference_finds_its_checkpoint_and_manifest(
    here: Path, ref: str, source: str, revision: str | None
) -> None:
    folder = found(ref)
    provenance = manifest.provenance(folder, "q8_0")
    assert provenance[manifest.SOURCE] == source
    assert provenance.get(manifest.REVISION) == revision
    assert name_of(folder) == source.rpartition("/")[2]


@pytest.mark.parametrize("ref", ["qwen3-0.6b", "m.gguf", "hf:o/r::file=m.gguf"])
def test_a_gguf_is_refused_as_already_converted(
    ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match="is a GGUF, which the worker serves unconverted"):
        found(ref)


def test_a_folder_and_its_download_have_the_same_digest(here: Path) -> None:
    """Even if the repository has more than the checkpoint."""
    assert manifest.digest(found("checkpoint")) == manifest.digest(found("hf:o/tiny"))


def test_verify_accepts_the_same_references_and_needs_no_network(
    here: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converted(f"hf:o/tiny@{COMMIT}")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for ref in ("mine", f"hf:o/tiny@{COMMIT}", "hf:o/tiny@v2"):
        # A branch that was never requested is unknown without the network.
        expected = 6 if ref.endswith("v2") else 0
        assert cli.run(["verify", ref, "out.gguf", "--progress", "none"]) == expected
    assert hub.requests == []
    output = capsys.readouterr()
    assert output.out.count("all test texts agree") == 2
    assert "offline mode is on" in output.err


def test_verify_notices_a_checkpoint_that_has_changed(
    here: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    converted("hf:o/tiny")
    changed = bytearray(FILES["model.safetensors"])
    changed[-1] ^= 1
    hub.repos["o/tiny"] = Repo(
        {**FILES, "model.safetensors": bytes(changed)}, branches={"main": OTHER_COMMIT}
    )
    assert cli.run(["verify", "hf:o/tiny", "out.gguf", "--progress", "none"]) == 3
    assert "verification of llorch.convert." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ref", "exit_code", "words"),
    [
        ("hf:o/none", 6, "needs a valid token"),
        ("hf:o/gated", 6, "gated or private"),
        ("hf:o/tiny@v9", 6, "no such revision"),
        ("hf:o/gguf", 3, "holds a GGUF; the converter needs SafeTensors"),
        ("hf:o/gguf::file=m.gguf", 3, "the converter needs a folder"),
        ("hf:o/pickles", 3, "neither SafeTensors"),
        ("hf:o/tiny::what=x", 2, "unknown option"),
        ("no-such-alias", 3, "is not in"),
        ("no/such/folder", 3, "does not exist"),
        ("/dev/null", 3, "is not a folder"),
        ("models.toml", 3, "the converter needs a folder"),
    ],
)
def test_each_unusable_reference_has_its_code_and_sentence(
    here: Path, hub: Hub, ref: str, exit_code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos["o/gated"] = Repo(dict(FILES), gated=True)
    hub.repos["o/gguf"] = Repo({"m.gguf": bytes(2048)})
    hub.repos["o/pickles"] = Repo({"config.json": b"{}", "pytorch_model.bin": bytes(2048)})
    assert cli.run([ref, "out.gguf", "--progress", "none"]) == exit_code
    sentence = capsys.readouterr().err.strip()
    assert words in sentence and len(sentence.splitlines()) == 1
    assert not Path("out.gguf").exists()
    assert not [path for path, _ in hub.bodies() if path.startswith("/blobs/")]


def test_a_terminal_shows_the_download_and_the_conversion(here: Path) -> None:
    terminal, its_end = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    command = [sys.executable, "-m", "worker.commands.convert", "hf:o/tiny", "out.gguf"]
    env = os.environ | {"TERM": "xterm"}
    child = subprocess.Popen(command, stdout=its_end, stderr=its_end, env=env)
    os.close(its_end)
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux reports this way that the last writer has left.
            break
        if not piece:
            break
        shown += piece
    os.close(terminal)
    assert child.wait() == 0
    *live, last = shown.decode().split("\r\x1b[K")
    phases = list(dict.fromkeys(each.partition("  ")[0] for each in live if each))
    assert phases == ["downloading", "checking", "reading the checkpoint", "converting"]
    assert last.startswith("wrote out.gguf: ") and last.endswith("verified\r\n")


def test_info_has_the_source_of_a_converted_model(here: Path, start_worker: StartWorker) -> None:
    written = converted(f"hf:o/tiny@{COMMIT}")
    assert read_header("out.gguf").name == "tiny"
    info = start_worker("--model", str(here / "out.gguf")).get("/info").json()
    conversion = info["model"]["conversion"]
    assert conversion == {
        "source": "o/tiny",
        "revision": COMMIT,
        "source_sha256": written[manifest.DIGEST],
        "outtype": "q8_0",
        "version": own_version(),
        "difference": None,
    }
    TypeAdapter(Info).validate_python(info)


@pytest.mark.parametrize(("ref", "code"), [("nope", 3), ("", 2), ("s3://bucket/model", 2)])
def test_an_invalid_reference_is_refused_with_the_valid_forms(
    here: Path, ref: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker's forms of references that the converter also accepts."""
    assert cli.run([ref, "out.gguf", "--progress", "none"]) == code
    message = capsys.readouterr().err
    assert "a folder of SafeTensors or hf:owner/repo@revision" in message and ".gguf" not in message
