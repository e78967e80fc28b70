"""A repository that holds one model in several quantisations, and no file was named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fetching import fetch
from tests.support.hub_server import Hub, Repo
from worker.errors import ModelError
from worker.models.hub.quantisation import SHARE, fitting, quantisations

LABELS = ("Q2_K", "IQ3_XS", "Q4_K_M", "UD-Q4_K_XL", "Q5_K_S", "Q6_K", "Q8_0", "F16", "BF16")
GIB = 1 << 30


@given(
    st.dictionaries(st.sampled_from(LABELS), st.integers(1, 100), min_size=1),
    st.integers(0, 300),
)
def test_the_largest_that_leaves_room_is_taken(sizes: dict[str, int], room: int) -> None:
    found = quantisations({f"Qwen3-8B-{label}.gguf": size for label, size in sizes.items()})
    chosen = fitting(found, room)
    fits = {n for label, n in sizes.items() if n <= SHARE * room and not label.endswith("F16")}
    assert (chosen.size_bytes if chosen else None) == max(fits, default=None)


@pytest.mark.parametrize(
    "files",
    [
        {"a-7B-Q4_K_M.gguf": 1, "a-1B-Q4_K_M.gguf": 1},  # two models
        {"a-Q4_K_M.gguf": 1, "notes.gguf": 1},
        {"a-Q4_K_M.gguf": None, "a-Q8_0.gguf": 2},  # the hub tells no sizes
        {"a-Q4_K_M-00001-of-00002.gguf": 1, "a-Q8_0.gguf": 2},  # a part is missing
    ],
)
def test_what_is_not_one_model_is_not_chosen_from(files: dict[str, int | None]) -> None:
    assert quantisations(files) == []


def test_parts_count_together_and_projectors_not_at_all() -> None:
    files = {
        "Q8_0/M-Q8_0-00001-of-00002.gguf": 6 * GIB,
        "Q8_0/M-Q8_0-00002-of-00002.gguf": 5 * GIB,
        "M-Q4_K_M.gguf": 6 * GIB,
        "mmproj-F16.gguf": GIB,
    }
    found = quantisations(files)
    assert [(each.label, each.size_bytes) for each in found] == [
        ("Q4_K_M", 6 * GIB),
        ("Q8_0", 11 * GIB),
    ]
    assert fitting(found, 24 * GIB) == found[1] and fitting(found, 20 * GIB) == found[0]


def test_the_choice_is_downloaded_and_told(
    hub: Hub, tmp_path: Path, gguf_bytes: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos["o/m"] = Repo(
        {"m-Q4_0.gguf": gguf_bytes, "m-Q8_0.gguf": gguf_bytes + bytes(4096), "README.md": b""}
    )

    def chosen(room: int) -> str:
        return fetch("hf:o/m", tmp_path, room=lambda: room)[0].path.name

    assert chosen(2 * len(gguf_bytes) + 8192) == "m-Q8_0.gguf"
    assert chosen(2 * len(gguf_bytes) + 10) == "m-Q4_0.gguf"
    assert "model.quantisation_chosen" in capsys.readouterr().out
    with pytest.raises(ModelError, match=r"smallest has .* hf:o/m::file=m-Q4_0.gguf"):
        chosen(len(gguf_bytes))
