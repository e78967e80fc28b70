"""The bits of every directly written type, compared with the `gguf` package's quantisers."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from worker.convert.quantize import (
    block_maximum,
    decode,
    encode,
    is_finite,
    size_bytes,
    tensor_type,
    to_float32,
)

KINDS = ["F32", "F16", "BF16", "Q8_0"]
# Below 1e-30 a block's scale has no inverse, and the package quantises infinities.
magnitude = st.one_of(st.just(0.0), st.floats(np.float32(1e-30).item(), 60000, width=32))
finite = arrays.arrays(
    np.float32,
    st.integers(1, 8).map(lambda n: (n, 64)),
    elements=st.one_of(magnitude, magnitude.map(lambda x: -x)),
)


def reference(values: npt.NDArray[np.float32], kind: str) -> bytes:
    return bytes(gguf.quantize(values, gguf.GGMLQuantizationType[kind]).tobytes())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(values=finite)
def test_float32_sources_give_the_same_bits(kind: str, values: npt.NDArray[np.float32]) -> None:
    got = encode(values, kind)
    assert got.tobytes() == reference(values, kind)
    assert got.size == size_bytes(kind, values.size)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(bits=arrays.arrays(np.uint16, (2, 64), elements=st.integers(0x0E00, 0x477F)))
def test_bf16_sources_give_the_same_bits(kind: str, bits: npt.NDArray[np.uint16]) -> None:
    assert encode(bits, kind).tobytes() == reference(to_float32(bits), kind)


def test_every_bf16_becomes_its_f16() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(over="ignore"):
        expected = to_float32(every).astype(np.float16)
    got = encode(every.reshape(1, -1), "F16").view(np.uint16)
    assert np.array_equal(got, expected.view(np.uint16))


def test_halves_are_rounded_away_from_zero_and_what_is_below_is_not() -> None:
    below = np.nextafter(np.float32(0.5), np.float32(0))
    values = np.zeros((1, 32), dtype=np.float32)
    values[0, :6] = [127, 0.5, -0.5, below, -below, 2.5]
    quantised = encode(values, "Q8_0")[2:].view(np.int8)
    assert quantised[:6].tolist() == [127, 1, -1, 0, 0, 3]
    assert encode(values, "Q8_0").tobytes() == reference(values, "Q8_0")


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38])
def test_a_block_without_a_scale_is_zero(value: float) -> None:
    block = np.full((1, 64), value, dtype=np.float32)
    assert not decode(encode(block, "Q8_0"), "Q8_0").any()


@pytest.mark.parametrize(
    ("wanted", "shape", "keep_f32", "expected"),
    [
        ("Q8_0", (64, 64), False, "Q8_0"),
        ("Q8_0", (64, 48), False, "F16"),
        ("Q8_0", (64,), False, "F32"),
        ("BF16", (64, 64), True, "F32"),
        ("BF16", (8, 64, 64), False, "BF16"),
    ],
)
def test_which_type_a_tensor_gets(
    wanted: str, shape: tuple[int, ...], keep_f32: bool, expected: str
) -> None:
    assert tensor_type(wanted, shape, keep_f32) == expected


def test_the_package_reads_what_was_written() -> None:
    values: npt.NDArray[Any] = np.linspace(-3, 3, 256, dtype=np.float32).reshape(4, 64)
    for kind in KINDS:
        read = gguf.dequantize(encode(values, kind), gguf.GGMLQuantizationType[kind])
        assert np.array_equal(decode(encode(values, kind), kind), np.ravel(read))


@pytest.mark.parametrize(
    ("dtype", "one", "minus_one"),
    [(np.float32, 1, -1), (np.float16, 1, -1), (np.uint16, 0x3F80, 0xBF80)],
)
def test_the_largest_magnitude_is_found_wherever_it_is(
    dtype: npt.DTypeLike, one: int, minus_one: int
) -> None:
    values = np.zeros((33, 32), dtype=dtype)
    for place in range(32):
        values[place, place] = one if place % 2 else minus_one
    assert block_maximum(values).tolist() == [1.0] * 32 + [0.0]


@pytest.mark.filterwarnings("error")
def test_no_value_makes_numpy_warn() -> None:
    """The converter itself reports values that a type cannot hold."""
    every = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 32)
    assert not is_finite(encode(every, "Q8_0"), "Q8_0")


def test_nan_and_infinities_are_found_among_all_values() -> None:
    """Like NumPy; a BF16 is the upper half of a float32."""
    every = np.arange(1 << 16, dtype=np.uint16)
    wide = every.astype(np.uint32) << 16
    for kind, numbers, values in (
        ("F16", every.view(np.float16), every),
        ("BF16", wide.view(np.float32), every),
        ("F32", wide.view(np.float32), wide),
    ):
        for value, expected in zip(values, np.isfinite(numbers), strict=True):
            one = np.array([0, value], dtype=values.dtype)
            assert is_finite(one.view(np.uint8), kind) == expected, (kind, hex(value))
    assert is_finite(np.empty(0, np.uint8), "BF16")
