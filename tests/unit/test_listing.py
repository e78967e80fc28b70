"""The output of `inspect` and `list`."""

from __future__ import annotations

from pathlib import Path

from tests import ROOT
from tests.support.samples import write_gguf
from worker.commands.listing import header_lines, printable, registry_text, size_text
from worker.models import registry
from worker.models.gguf.header import read_header


def test_a_header_as_text(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", overrides={"general.name": "evil\x1b[2J\nname", "x.long": "y" * 500}
    )
    text = "\n".join(header_lines(read_header(path)))
    lines = text.splitlines()
    assert "quantization      Q8_0" in lines
    assert "vocabulary        40" in lines
    assert any(line.split() == ["F32", "2", "tensors", "10.5", "kB"] for line in lines)
    assert any("tokenizer.ggml.tokens" in line and "[40 items]" in line for line in lines)
    assert any(line.split()[:2] == ["blk.0.attn_q.weight", "Q8_0"] for line in lines)
    assert "evil·[2J·name" in text and "\x1b" not in text
    assert "(500 characters)" in text


def test_the_shipped_registry_as_a_table() -> None:
    text = registry_text(registry.load(ROOT / "models.toml"))
    first, second, *_ = text.splitlines()
    assert " ".join(first.split()) == "ALIAS PARAMETERS QUANTIZATION CONTEXT SIZE DESCRIPTION"
    assert second.startswith("tiny-model")
    assert "qwen3-0.6b" in text and "639.4 MB" in text
    assert text.endswith("models.toml")


def test_sizes_and_values() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1.0 kB", 5_251_576: "5.3 MB", 4_920_739_232: "4.92 GB"}
    assert {n: size_text(n) for n in sizes} == sizes
    assert printable("a\tb") == "a·b"
    assert printable(True) == "True"
