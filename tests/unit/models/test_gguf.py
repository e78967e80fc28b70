"""Headers of real GGUF files: their content, and the error for each kind of damage."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.support import clock
from tests.support.samples import BYTES, VOCAB, write_gguf, write_split
from worker.errors import ModelError
from worker.models.gguf.header import (
    current_header,
    packed,
    parts_beside,
    read_header,
    split_names,
)
from worker.models.gguf.servable import check_servable


def test_a_header_has_the_written_values(tmp_path: Path) -> None:
    header = read_header(write_gguf(tmp_path / "model.gguf"))
    assert header.architecture == "llama"
    assert header.name == "A sample"
    assert header.quant_kind == "Q8_0"
    assert header.tokenizer_kind == "gguf-bpe"
    assert header.vocab_size == len(VOCAB)
    assert (header.context_length, header.embedding_length, header.block_count) == (256, 64, 1)
    assert (header.head_count, header.head_count_kv) == (4, 2)
    assert header.chat_template == "{{ messages[0].content }}"
    assert header.pooling is None
    assert header.size_bytes == (tmp_path / "model.gguf").stat().st_size
    assert header.summary()["tokenizer.ggml.tokens"] == "[40 items]"
    check_servable(header)


def test_tensors_equal_those_of_the_reference_reader(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    header = read_header(path)
    expected = gguf.GGUFReader(path).tensors
    assert [
        (t.name, t.type_name, list(t.shape), t.offset, t.n_bytes, t.n_elements)
        for t in header.tensors
    ] == [
        (t.name, t.tensor_type.name, t.shape.tolist(), t.data_offset, t.n_bytes, t.n_elements)
        for t in expected
    ]
    assert header.tensor_bytes == sum(int(t.n_bytes) for t in expected)
    assert list(header.tensor_types()) == ["F32", "Q8_0"]


def test_arrays_are_read_on_demand(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        overrides={"x.floats": [0.5, 1.5], "x.flags": [True, False], "x.words": ["ä", "🦊"]},
    )
    arrays = read_header(path).arrays
    assert arrays["tokenizer.ggml.tokens"].read() == VOCAB
    assert arrays["tokenizer.ggml.token_type"].read() == [1] * len(VOCAB)
    assert arrays["x.floats"].read() == [0.5, 1.5]
    assert arrays["x.flags"].read() == [True, False]
    assert arrays["x.words"].read() == ["ä", "🦊"]


@pytest.mark.parametrize(
    ("file_type", "expected"),
    [
        (gguf.LlamaFileType.MOSTLY_Q4_K_M, "Q4_K_M"),
        (gguf.LlamaFileType.ALL_F32, "F32"),
        (gguf.LlamaFileType.MOSTLY_BF16, "BF16"),
        (gguf.LlamaFileType.GUESSED, "F32"),
        (9999, "F32"),
    ],
)
def test_the_quantisation_is_the_files_own_else_that_of_most_bytes(
    tmp_path: Path, file_type: int, expected: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", overrides={"general.file_type": int(file_type)})
    assert read_header(path).quant_kind == expected


@pytest.mark.parametrize(
    ("model", "kind"),
    [("llama", "gguf-spm"), ("gpt2", "gguf-bpe"), ("bert", "gguf-wpm"), ("t5", "gguf-ugm")],
)
def test_tokenizer_kind(tmp_path: Path, model: str, kind: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", overrides={"tokenizer.ggml.model": model})
    assert read_header(path).tokenizer_kind == kind


def test_heads_that_differ_by_layer_give_the_largest(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        overrides={"llama.attention.head_count_kv": [2, 8, 4], "llama.pooling_type": 3},
    )
    header = read_header(path)
    assert header.head_count_kv == 8
    assert header.pooling == "last"


def test_a_large_vocabulary_is_read_fast(tmp_path: Path) -> None:
    vocab = [f"word{index}" for index in range(150_000)]
    path = write_gguf(tmp_path / "m.gguf", vocab=vocab, tensors=False)
    read_header(path)
    started = time.process_time()  # which does not advance while other processes have the CPU
    header = read_header(path)
    elapsed = time.process_time() - started
    assert header.vocab_size == 150_000
    assert clock.within(elapsed, 1), f"took {elapsed:.3f} s"


def test_a_missing_file_a_folder_and_an_unreadable_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_header(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelError, match="is a folder"):
        read_header(tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path / ("n" * 300 + ".gguf"))


def test_a_truncated_download_is_reported_with_both_sizes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(whole - 300)
    with pytest.raises(ModelError, match=rf"truncated: .* the file after {whole - 300}"):
        read_header(path)


def entry(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    raw = name.encode()
    return (
        struct.pack("<Q", len(raw))
        + raw
        + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        + struct.pack("<IQ", kind, offset)
    )


def file_with(entries: list[bytes], keys: list[bytes] | None = None, data: int = 4096) -> bytes:
    architecture = b"general.architecture"
    pairs = [
        struct.pack("<Q", len(architecture)) + architecture + struct.pack("<IQ", 8, 5) + b"llama",
        *(keys or []),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(pairs))
    return head + b"".join(pairs) + b"".join(entries) + bytes(data)


def key(name: str, kind: int, raw: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + raw


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"Once upon a time\n", "begins with 'Once'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"lmgg" + bytes(40), "old GGML format"),
        (struct.pack("<Q", 9) + b'{"a": {}}' + bytes(9), "SafeTensors"),
        (b"GGUF" + bytes(8), "inside the header"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "metadata keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "no general.architecture"),
        (file_with([entry("a", [8], 0, 0), entry("a", [8], 0, 32)]), "'a' occurs twice"),
        (file_with([entry("a", [8], 0, 0), entry("b", [8], 0, 0)]), "instead of 32"),
        (file_with([entry("a", [8], 0, 0), entry("b", [8], 0, 33)]), "instead of 32"),
        (file_with([entry("a", [8], 0, 2**63)]), "instead of 0"),
        (file_with([entry("a", [8], 4, 0)]), "unknown type 4"),
        (file_with([entry("a", [33], 8, 0)]), "rows of 33 elements"),
        (file_with([entry("a", [0, 4], 0, 0)]), "impossible shape"),
        (file_with([entry("a", [2**40, 2**40], 0, 0)]), "impossible shape"),
        (file_with([entry("a", [1] * 5, 0, 0)]), "5 dimensions"),
        (file_with([entry("a" * 64, [8], 0, 0)]), "64 bytes long"),
        (file_with([entry("", [8], 0, 0)]), "0 bytes long"),
        (file_with([entry("a", [2**20], 0, 0)]), "truncated"),
        (file_with([], [key("x", 13, b"")]), "unknown type 13"),
        (file_with([], [key("x", 9, struct.pack("<IQ", 9, 1))]), "unknown type 9"),
        (file_with([], [key("x", 9, struct.pack("<IQ", 4, 2**29))]), "needs 2147483648 bytes"),
        (file_with([], [key("x", 9, struct.pack("<IQ", 4, 2**62))]), "claims"),
        (file_with([], [key("x", 9, struct.pack("<IQ", 8, 2**20))]), "1048576 strings"),
        (file_with([], [key("x", 9, struct.pack("<IQQ", 8, 1, 2**63))]), "past the end"),
        (file_with([], [key("x", 8, struct.pack("<Q", 2**40))]), "more than the allowed"),
        (file_with([], [key("x", 4, bytes(4)), key("x", 4, bytes(4))]), "occurs twice"),
        (file_with([], [key("general.alignment", 4, struct.pack("<I", 0))]), "power of two"),
        (file_with([], [key("general.alignment", 4, struct.pack("<I", 48))]), "power of two"),
        (file_with([], [key("general.alignment", 8, struct.pack("<Q", 0))]), "not a uint32"),
        (file_with([], [key("general.name", 4, bytes(4))]), "uint32 instead of string"),
        (file_with([], [key("llama.block_count", 5, b"\xff" * 4)]), "its type is int32"),
        (file_with([], [key("llama.pooling_type", 4, b"\x09\0\0\0")]), "unknown pooling type 9"),
        (file_with([], [key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 4, 1))]), "of strings"),
    ],
)
def test_each_fault_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_header(path)
    assert words in caught.value.message
    assert "model.gguf" in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overrides": {"general.type": "adapter"}}, "its type is .adapter."),
        ({"tensors": False}, "vocabulary without weights"),
        ({"without": frozenset({"tokenizer.ggml.model"})}, "no tokenizer"),
        (
            {
                "without": frozenset({"tokenizer.ggml.tokens"}),
                "overrides": {"llama.vocab_size": 40},
            },
            "no tokenizer",
        ),
        ({"without": frozenset({"llama.context_length"})}, "no llama.context_length"),
        ({"overrides": {"llama.embedding_length": 0}}, "no llama.embedding_length above 0"),
        ({"overrides": {"llama.block_count": 513}}, "513 layers"),
        ({"overrides": {"llama.attention.value_length": 2**30 + 32}}, "value_length is 1073741856"),
        ({"overrides": {"llama.attention.head_count_kv": 2**27 + 4}}, "head_count_kv is 134217732"),
        ({"overrides": {"llama.attention.head_count": 0}}, "no attention heads"),
        ({"overrides": {"llama.rope.dimension_count": 4096}}, "rotates 4096 dimensions"),
        ({"overrides": {"llama.rope.dimension_count": 0}}, "rotates no dimension"),
        ({"overrides": {"llama.expert_count": 1025}}, "1025 experts"),
        ({"overrides": {"llama.expert_used_count": 2}}, "use 2 of 0 experts"),
        ({"overrides": {"tokenizer.ggml.scores": [1.0] * 39}}, "39 float32 values"),
        ({"overrides": {"llama.attention.layer_norm_rms_epsilon": -1e-6}}, "finite, non-negative"),
        ({"overrides": {"llama.attention.layer_norm_rms_epsilon": math.nan}}, "is nan"),
        ({"vocab": ["a", "b", "a"]}, "only 2 different tokens"),
        ({"vocab": ["a", "b\0c", "b\0d"]}, "only 2 different tokens"),
        ({"overrides": {"tokenizer.ggml.model": "llama"}}, "no token for byte 0"),
        (
            {"vocab": BYTES[:0xC2] + BYTES[0xC3:], "overrides": {"tokenizer.ggml.model": "llama"}},
            "no token for byte 194",
        ),
        ({"architecture": "clip"}, "image encoder"),
        ({"architecture": "t5"}, "encoder-decoder"),
        ({"architecture": "llada"}, "diffusion"),
    ],
)
def test_models_that_cannot_be_served_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf", **changes))
    with pytest.raises(ModelError, match=words):
        check_servable(header)


@pytest.mark.parametrize(
    "odd",
    [
        {"vocab": BYTES, "overrides": {"tokenizer.ggml.model": "llama"}},
        # No text contains the other bytes.
        {
            "vocab": BYTES[:0xC0] + BYTES[0xC2:0xF5],
            "overrides": {"tokenizer.ggml.model": "llama"},
        },
        {"vocab": ["a", "", ""]},
        {"architecture": "hunyuan-dense", "overrides": {"hunyuan-dense.expert_count": 1}},
        {"architecture": "glm5-next", "overrides": {"glm5-next.rope.dimension_count": 0}},
        {"architecture": "llorch{0}{arch"},
    ],
)
def test_odd_files_that_are_served(tmp_path: Path, odd: dict[str, Any]) -> None:
    check_servable(read_header(write_gguf(tmp_path / "m.gguf", **odd)))


# --- split models ------------------------------------------------------------------------


def test_a_split_model_is_read_whole(tmp_path: Path) -> None:
    paths = write_split(tmp_path, count=3)
    header = read_header(paths[0])
    assert header.parts == tuple(paths)
    assert [t.name for t in header.tensors] == [f"part{number}.weight" for number in range(3)]
    assert header.size_bytes == sum(path.stat().st_size for path in paths)
    last = header.tensors[2]
    raw = paths[2].read_bytes()[last.offset : last.offset + last.n_bytes]
    assert np.frombuffer(raw, dtype=np.float32).tolist() == [2.0] * 128


def test_faults_of_split_models_are_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path, count=3)
    with pytest.raises(ModelError, match="give its first part, named 'split-00001-of-00003.gguf'"):
        read_header(paths[1])
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(paths[0].read_bytes())
    with pytest.raises(ModelError, match="one of 3 parts"):
        read_header(renamed)
    first = paths[0].read_bytes()
    paths[0].write_bytes(paths[1].read_bytes())
    with pytest.raises(ModelError, match="named as the first part of a split model but is not"):
        read_header(paths[0])
    key = b"split.tensors.count"
    value = first.index(key) + len(key) + 4  # after its type
    paths[0].write_bytes(first[:value] + b"\x09" + first[value + 1 :])
    with pytest.raises(ModelError, match="its parts hold 3 tensors, but it announces 9"):
        read_header(paths[0])
    paths[0].write_bytes(first)
    third = paths[2].read_bytes()
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(ModelError, match="does not say that it is part 3 of 3"):
        read_header(paths[0])
    paths[2].write_bytes(third[:-20])
    with pytest.raises(ModelError, match=r"00003-of-00003.gguf' is not .* truncated"):
        read_header(paths[0])
    paths[2].unlink()
    with pytest.raises(ModelError, match=r"00003-of-00003.gguf' does not exist"):
        read_header(paths[0])


def test_names_of_parts() -> None:
    assert split_names("dir/m-00001-of-00002.gguf") == (
        "dir/m-00001-of-00002.gguf",
        "dir/m-00002-of-00002.gguf",
    )
    for name in ("dir/m.gguf", "m-00003-of-00002.gguf", "m-00000-of-00000.gguf"):
        assert split_names(name) == (name,)
    assert parts_beside(Path("/x/m-00001-of-00002.gguf"))[1] == Path("/x/m-00002-of-00002.gguf")


def test_reading_a_header_loads_no_numpy(tmp_path: Path) -> None:
    """The API process reads headers; it must stay small."""
    path = write_gguf(tmp_path / "m.gguf")
    script = (
        "import sys; from worker.models.gguf.header import read_header\n"
        "header = read_header(sys.argv[1])\n"
        "print(header.quant_kind, header.tensors[1].type_name, 'numpy' in sys.modules)"
    )
    child = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.split() == ["Q8_0", "Q8_0", "False"]


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    array = read_header(path).arrays["tokenizer.ggml.tokens"]
    with path.open("r+b") as file:
        file.truncate(array.offset + 20)
    with pytest.raises(ModelError, match="became shorter"):
        array.read()


def test_a_known_header_is_used_while_the_file_is_the_same(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", overrides={"general.name": "One model"})
    known = packed(read_header(path))
    assert current_header(known, path) == current_header(None, path) == read_header(path)
    of_one_size = write_gguf(tmp_path / "new.gguf", overrides={"general.name": "Two of it"})
    before = path.stat()
    assert of_one_size.stat().st_size == before.st_size
    os.utime(of_one_size, ns=(before.st_atime_ns, before.st_mtime_ns))
    of_one_size.replace(path)
    assert current_header(known, path).name == "Two of it"
    known = packed(read_header(path))
    write_gguf(path, overrides={"general.name": "One model"})  # the same file with another mtime
    assert current_header(known, path).name == "One model"
    other = write_gguf(tmp_path / "other.gguf")
    assert current_header(known, other).path == other
