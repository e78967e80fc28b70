"""`verify` finds any single change to a converted file."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.unit.convert.check_here import CheckHere
from tests.unit.convert.files import converted, read, verified, write, write_importance
from tests.unit.convert.test_parity import checkpoint
from worker.commands.progress import Reporter
from worker.convert import manifest, verify
from worker.convert.prepare import Options
from worker.convert.quantize import to_float32
from worker.convert.tokenizer.check import CheckedTokens
from worker.errors import ModelError
from worker.models.gguf.header import read_header
from worker.models.gguf.layout import GgufLayout, read_layout
from worker.models.resolve import bundled_folder


def check(source: Path, file: Path) -> int:
    return verify.check_file(source, file, Options(), Reporter("none"))


def meaning(layout: GgufLayout) -> object:
    """Return the header's content without the version that wrote it, independent of its bytes."""
    arrays = {key: (a.item_type, a.read()) for key, a in layout.arrays.items()}
    return layout.metadata | {manifest.VERSION: ""}, layout.types, arrays, layout.tensors


def test_a_file_of_another_version_is_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("llama-3.1", tmp_path)
    monkeypatch.setattr(manifest, "own_version", lambda: "0.0.9")
    target = converted(source, tmp_path / "model.gguf")
    monkeypatch.undo()
    assert verified(source, target) == 0
    assert "written by version '0.0.9'" in capsys.readouterr().err


@pytest.mark.parametrize("outtype", ["q8_0", "f16", "bf16", "f32"])
@pytest.mark.parametrize("n_changes", [20, pytest.param(200, marks=pytest.mark.long)])
def test_every_random_change_is_found(outtype: str, n_changes: int, tmp_path: Path) -> None:
    """Half of the changes are in metadata and vocabulary, half in weights, where the tensor is
    named."""
    source = checkpoint("llama-3.1", tmp_path)
    target = converted(source, tmp_path / "model.gguf", "--outtype", outtype)
    assert check(source, target) > 10
    layout = read_layout(target)
    whole, meant = target.read_bytes(), meaning(layout)
    end = whole.index(layout.tensors[0].name.encode())  # In the metadata.
    draw, changed = random.Random(f"{outtype} {n_changes}"), tmp_path / "changed.gguf"
    missed = []
    n = 0
    while n < n_changes:
        position, name = draw.randrange(24, end), ""
        if n % 2:
            tensor = draw.choice(layout.tensors)
            position, name = tensor.offset + draw.randrange(tensor.n_bytes), tensor.name
        data = bytearray(whole)
        data[position] ^= 1 << draw.randrange(8)
        changed.write_bytes(data)
        try:
            if n % 2 == 0 and meaning(read_layout(changed)) == meant:
                continue  # Such as a boolean that is 3 instead of 1.
        except ModelError:
            pass
        n += 1
        try:
            check(source, changed)
            missed.append(position)
        except ModelError as error:
            assert not name or f"verification of tensor {name} failed" in error.message
    assert missed == []


def test_one_bit_of_a_k_quant_is_found_and_its_importance_matrix_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, name = checkpoint("llama-3.1", tmp_path), "blk.0.ffn_up.weight"
    write_importance(tmp_path / "importance.gguf", {name: np.linspace(1, 90, 64)})
    flags = ["--imatrix", str(tmp_path / "importance.gguf")]
    target = converted(source, tmp_path / "model.gguf", "--outtype", "q4_k_m", *flags)
    assert verified(source, target, *flags) == 0
    (source / "added_tokens.json").write_text("{}")  # Nothing but the source's digest differs.
    assert verified(source, target, *flags) == 3
    assert "verification of llorch.convert.source_sha256 failed" in capsys.readouterr().err
    (source / "added_tokens.json").unlink()
    assert verified(source, target) == 3
    assert "with --imatrix" in capsys.readouterr().err
    tensor = next(t for t in read_layout(target).tensors if t.name == name)
    with target.open("r+b") as file:
        file.seek(tensor.offset + tensor.n_bytes - 1)
        (last,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([last ^ 1]))
    assert verified(source, target, *flags) == 3
    assert f"{name} failed: its bytes" in capsys.readouterr().err
    assert not list(tmp_path.glob(".llorch-scratch-*"))


@pytest.mark.parametrize(
    ("exponent", "outtype"),
    [
        *((-9, outtype) for outtype in ("q5_k_m", "q4_k_m", "q4_0", "iq4_xs", "q3_k_m", "q2_k")),
        (-80, "q4_k_m"),
    ],
)
def test_values_below_the_smallest_step_of_a_type_may_be_lost(
    outtype: str, exponent: int, tmp_path: Path
) -> None:
    """Such as rows of untrained tokens, of which whole chunks are 1e-24."""
    source = Path(shutil.copytree(bundled_folder(), tmp_path / "untrained"))
    header, data = read(source / "model.safetensors")
    values = to_float32(np.frombuffer(data, np.uint16)) * np.float32(2.0**exponent)
    small = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    write(source / "model.safetensors", header, small)
    converted(source, tmp_path / "model.gguf", "--outtype", outtype)


def test_values_that_the_type_can_hold_may_not_be_lost(tmp_path: Path) -> None:
    source = bundled_folder()
    target = converted(source, tmp_path / "model.gguf", "--outtype", "q4_k_m")
    tensor = next(t for t in read_layout(target).tensors if t.type_name == "Q6_K")
    with target.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(bytes(tensor.n_bytes))
    with pytest.raises(ModelError, match=f"{tensor.name} .* Q6_K with an error of 100%"):
        check(source, target)


def test_verify_needs_the_given_pre_tokenizer_and_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, flags = checkpoint("llama", tmp_path), ["--name", "Mine", "--pre-tokenizer", "mpt"]
    target = converted(source, tmp_path / "model.gguf", *flags)
    assert verified(source, target, *flags) == 0
    assert verified(source, target, *flags[2:]) == 3
    error = capsys.readouterr().err
    assert "general.name failed: it has 'Mine' instead of 'llama'; --name must be given" in error
    assert verified(source, target, *flags[:2]) == 3
    error = capsys.readouterr().err
    assert "tokenizer.ggml.pre failed" in error and "--pre-tokenizer must be given" in error


def test_a_file_of_an_earlier_build_has_the_same_words_for_token_ids_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = CheckedTokens(9, ["e\u0301"], "at combining marks")
    monkeypatch.setattr(CheckHere, "check", lambda *_: found)
    target = converted(bundled_folder(), tmp_path / "model.gguf")
    assert read_header(target).metadata[manifest.DIFFERENCE] == (
        "token ids differ from the source's for 1 of 9 test texts: llama.cpp splits otherwise at "
        "combining marks, as in 'e\u0301'"
    )
    assert check(bundled_folder(), target) > 10


def test_a_key_that_one_side_lacks_is_reported_as_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, matrix = checkpoint("llama-3.1", tmp_path), tmp_path / "importance.gguf"
    write_importance(matrix, {"blk.0.ffn_up.weight": np.linspace(1, 90, 64)})
    target = converted(source, tmp_path / "model.gguf", "--outtype", "q4_k_m")
    assert verified(source, target, "--imatrix", str(matrix)) == 3
    error = capsys.readouterr().err
    assert "imatrix_sha256 failed: the file lacks it; --imatrix must be given, or not" in error
    surplus = verify._key_differs("key", [], ["string", "x"])
    assert surplus.message == "verification of key failed: the source does not have it"


@pytest.mark.parametrize("outtype", ["f16", "q4_k_m"])
def test_bytes_that_belong_to_no_tensor_are_found(
    outtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = bundled_folder()
    target = converted(source, tmp_path / "model.gguf", "--outtype", outtype)
    with target.open("ab") as file:
        file.write(bytes(400))
    assert verified(source, target) == 3
    assert "bytes after its last tensor" in capsys.readouterr().err
