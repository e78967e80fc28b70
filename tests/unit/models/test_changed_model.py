"""The effect of `--override-kv` and `--control-vector` on a model, before native code sees it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bundled import bundled_gguf
from tests.support.random_adapters import random_control_vector
from worker.errors import WorkerError
from worker.models.control_vectors import Directions, read_directions
from worker.models.gguf.header import GgufHeader, read_header
from worker.models.gguf.servable import check_overridden
from worker.wire.engine_settings import EngineSettings
from worker.wire.overrides import parse_override, separated


def changed(*overrides: str, pooling: str | None = None) -> GgufHeader:
    settings = EngineSettings(override_kv=overrides, pooling=pooling)  # type: ignore[arg-type]
    return check_overridden(read_header(bundled_gguf("f32")), settings.overrides)


def test_overrides_change_the_header() -> None:
    header = changed("{arch}.context_length=int:77", "general.name=str:Ada")
    assert (header.context_length, header.name) == (77, "Ada")
    assert header.summary()["llama.context_length"] == 77
    assert [changed(pooling=each).pooling for each in ("none", "last")] == ["none", "last"]
    assert changed().pooling is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("llama.block_count=float:2", "2.0 does not fit its type, uint32"),
        ("llama.block_count=int:-1", "-1 does not fit its type, uint32"),
        ("general.name=bool:true", "True does not fit its type, string"),
        ("tokenizer.ggml.tokens=str:a", "it is a list in the file"),
        ("general.alignment=int:64", "it describes the file"),
        ("split.count=int:2", "it describes the file"),
        ("llama.attention.head_count=int:99999", "99999, more than"),
        ("general.architecture=str:clip", "not a language model"),
        ("llama.pooling_type=int:4", "without a ranking head"),
    ],
)
def test_overrides_that_llama_cpp_would_ignore_or_die_of_are_refused(
    override: str, words: str
) -> None:
    with pytest.raises(WorkerError) as refused:
        changed(override)
    assert words in refused.value.message


@given(st.lists(st.tuples(st.text("ab.{}", min_size=1), st.text("a,= :", max_size=20)), min_size=1))
def test_texts_with_commas_are_split_where_the_next_key_begins(
    pairs: list[tuple[str, str]],
) -> None:
    texts = [f"{key}=str:{value}" for key, value in pairs]
    parted = [parse_override(each) for each in separated(",".join(texts))]
    assert parted == pairs


def directions(*vectors: str, layers: tuple[int, int] | None = None) -> Directions:
    settings = EngineSettings(control_vector=vectors, control_vector_layer_range=layers)
    found = read_directions(settings, read_header(bundled_gguf("f32")))
    assert found is not None
    return found


def test_vectors_are_scaled_added_up_and_cut_to_their_layers(tmp_path: Path) -> None:
    base = bundled_gguf("f32")
    one, two = (random_control_vector(base, tmp_path / f"{n}.gguf", n) for n in range(2))
    each = [np.stack([t.data for t in gguf.GGUFReader(path).tensors]) for path in (one, two)]
    whole = directions(f"{one}:0.5", f"{two}:-2")
    assert whole == pytest.approx(0.5 * each[0] - 2 * each[1], abs=1e-5)
    part = directions(str(one), layers=(2, 2))
    assert np.flatnonzero(part.any(axis=1)).tolist() == [1]
    assert part[1] == pytest.approx(each[0][1])


@pytest.mark.parametrize(
    ("file", "layers", "words"),
    [
        ("nowhere.gguf", None, "does not exist"),
        ("model", None, "is not a control vector"),
        ("other", None, "is not for"),
        ("other", (1, 99), "last layer"),
        ("other", (4, 4), "last layer is 3"),
    ],
)
def test_a_control_vector_that_does_not_fit_the_model_is_refused(
    file: str, layers: tuple[int, int] | None, words: str, tmp_path: Path
) -> None:
    model = bundled_gguf("f32")
    other = random_control_vector(model, tmp_path / "other.gguf", 0, width=32)
    paths = {"model": str(model), "other": str(other)}
    with pytest.raises(WorkerError) as refused:
        directions(paths.get(file, file), layers=layers)
    assert words in refused.value.message
