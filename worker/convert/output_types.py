"""The output types: each one's number in the file, and how its weights are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OutputFormat:
    file_type: int
    """llama.cpp's `llama_ftype`, and the file's `general.file_type`."""
    tensor_type: str | None = None
    """The tensor type, if the converter writes the weights itself. `None`: llama.cpp's quantiser
    makes them from an intermediate file."""
    bits_per_weight: float = 0.0
    """An upper estimate for the types that the quantiser makes, to check the free disk space."""


FORMATS: Mapping[str, OutputFormat] = {
    "f32": OutputFormat(0, "F32"),
    "f16": OutputFormat(1, "F16"),
    "bf16": OutputFormat(32, "BF16"),
    "q8_0": OutputFormat(7, "Q8_0"),
    "q6_k": OutputFormat(18, bits_per_weight=7.0),
    "q5_k_m": OutputFormat(17, bits_per_weight=6.1),
    "q5_k_s": OutputFormat(16, bits_per_weight=5.9),
    "q4_k_m": OutputFormat(15, bits_per_weight=5.3),
    "q4_k_s": OutputFormat(14, bits_per_weight=5.0),
    "q4_0": OutputFormat(2, bits_per_weight=5.0),
    "iq4_nl": OutputFormat(25, bits_per_weight=5.0),
    "iq4_xs": OutputFormat(30, bits_per_weight=4.8),
    "q3_k_l": OutputFormat(13, bits_per_weight=4.7),
    "q3_k_m": OutputFormat(12, bits_per_weight=4.4),
    "q3_k_s": OutputFormat(11, bits_per_weight=4.0),
    "q2_k": OutputFormat(10, bits_per_weight=3.6),
}
