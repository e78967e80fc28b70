"""A repository with several quantisations of a model: which one a reference without a file
selects."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fetching import fetch
from tests.support.hub_server import COMMIT, Hub, Repo
from worker.errors import ModelError
from worker.models.hub.quantisation import SHARE, fitting, models_in, of_one_model

BEYOND_Q8_0 = ("UD-Q8_K_XL", "F16", "BF16")
LABELS = "TQ1_0 Q2_K IQ3_XS MXFP4_MOE NVFP4 Q4_K_M UD-Q4_K_XL Q5_K_S Q6_K Q8_0".split()
LABELS += BEYOND_Q8_0
GIB = 1 << 30


@given(
    st.dictionaries(st.sampled_from(LABELS), st.integers(1, 100), min_size=1),
    st.integers(0, 300),
)
def test_the_largest_that_leaves_room_is_taken(sizes: dict[str, int], room: int) -> None:
    found = of_one_model(
        models_in({f"Qwen3-8B-{label}.gguf": size for label, size in sizes.items()})
    )
    chosen = fitting(found, room)
    fits = {n for label, n in sizes.items() if n <= SHARE * room and label not in BEYOND_Q8_0}
    assert (chosen.size_bytes if chosen else None) == max(fits, default=None)


@pytest.mark.parametrize(
    "files",
    [
        {"a-7B-Q4_K_M.gguf": 1, "a-1B-Q4_K_M.gguf": 1},  # two models
        {"a-Q4_K_M.gguf": 1, "notes.gguf": 1},
        {"a-Q4_K_M.gguf": 1, "a-Q8_0-imatrix.gguf": 1},  # a model, whatever else is in its name
        {"a-Q4_K_M.gguf": None, "a-Q8_0.gguf": 2},  # the hub reports no sizes
        {"a-Q4_K_M-00001-of-00002.gguf": 1, "a-Q8_0.gguf": 2},  # a part is missing
    ],
)
def test_files_that_are_not_one_model_are_not_chosen_from(files: dict[str, int | None]) -> None:
    assert of_one_model(models_in(files)) == []


def test_parts_count_together_and_projectors_not_at_all() -> None:
    files = {
        "Q8_0/M-Q8_0-00001-of-00002.gguf": 6 * GIB,
        "Q8_0/M-Q8_0-00002-of-00002.gguf": 5 * GIB,
        "M-Q4_K_M.gguf": 6 * GIB,
        "mmproj-F16.gguf": GIB,
    }
    found = of_one_model(models_in(files))
    assert [(each.label, each.size_bytes) for each in found] == [
        ("Q4_K_M", 6 * GIB),
        ("Q8_0", 11 * GIB),
    ]
    assert fitting(found, 24 * GIB) == found[1] and fitting(found, 20 * GIB) == found[0]


def test_the_chosen_quantisation_is_downloaded_and_logged(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {"README.md": b"", "m-imatrix.gguf": b"GGUF"}  # as llama-imatrix names it
    weights = {"m-Q4_0.gguf": gguf_bytes, "m-Q8_0.gguf": gguf_bytes + bytes(4096)}
    hub.repos["o/m"] = Repo({**weights, **others})

    def chosen(room: int) -> str:
        return fetch("hf:o/m", tmp_path, room=lambda: room)[0].path.name

    assert chosen(2 * len(gguf_bytes) + 8192) == "m-Q8_0.gguf"
    assert chosen(2 * len(gguf_bytes) + 10) == "m-Q4_0.gguf"
    assert fetch("hf:o/m:q4_0", tmp_path)[0].path.name == "m-Q4_0.gguf"
    assert "model.quantisation_chosen" in capsys.readouterr().out
    with pytest.raises(ModelError, match=r"smallest has .* hf:o/m::file=m-Q4_0.gguf"):
        chosen(len(gguf_bytes))


@pytest.mark.parametrize(
    ("label", "file"),
    [
        ("q8_0", "m-Q8_0.gguf"),
        ("IQ3_XS", "m.IQ3_XS.gguf"),
        ("bf16", "m-BF16.gguf"),
        ("TQ1_0", "big/m-TQ1_0-00001-of-00002.gguf"),
        ("UD-Q8_0", "m-UD-Q8_0.gguf"),
        ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
    ],
)
def test_a_quantisation_is_found_by_llama_servers_name(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, label: str, file: str
) -> None:
    """Beside a checkpoint, a projector and another file; independent of this machine's memory."""
    split = "big/m-TQ1_0-0000{}-of-00002.gguf"
    names = ["m-Q8_0.gguf", "m.IQ3_XS.gguf", "m-BF16.gguf", split.format(1), split.format(2)]
    names += ["m-UD-Q4_K_XL.gguf", "m-UD-Q8_0.gguf"]
    others = {"mmproj-Q8_0.gguf": b"", "notes.gguf": b"", "config.json": b"{}"}
    weights = {"model.safetensors": b"", "tokenizer.json": b"{}"}
    hub.repos["o/m"] = Repo({**dict.fromkeys(names, gguf_bytes), **others, **weights})
    got = fetch(f"hf:o/m:{label}", tmp_path)[0].path
    assert got.as_posix().endswith(f"/{file}")
    hub.requests.clear()
    assert fetch(f"hf:o/m:{label}@{COMMIT}", tmp_path)[0].path == got and hub.requests == []


def test_a_missing_or_ambiguous_quantisation_is_refused(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes
) -> None:
    names = ("m-Q4_0.gguf", "m-Q8_0.gguf", "n-Q8_0.gguf", "mmproj-Q6_K.gguf", "notes.gguf")
    hub.repos["o/m"] = Repo(dict.fromkeys(names, gguf_bytes))
    with pytest.raises(ModelError, match=r"holds no GGUF in Q6_K; it has Q4_0, Q8_0\."):
        fetch("hf:o/m:Q6_K", tmp_path, room=lambda: 1 << 40)
    with pytest.raises(ModelError, match=r"2 GGUF files; name one, as in hf:o/m::file=m-Q8_0"):
        fetch("hf:o/m:Q8_0", tmp_path, room=lambda: 1 << 40)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("m.gguf", "n.gguf"), r"no GGUF in Q8_0; it has m\.gguf, n\.gguf\."),
        (("config.json", "tokenizer.json", "model.safetensors"), r"no GGUF in Q8_0\."),
    ],
)
def test_a_quantisation_of_a_repository_without_any_is_refused(
    hub: Hub, tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    hub.repos["o/m"] = Repo(dict.fromkeys(names, b"{}"))
    with pytest.raises(ModelError, match=f"holds {words}"):
        fetch("hf:o/m:Q8_0", tmp_path)
