"""Weights generated in a quantised format match their description."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from tools.bench.blocks import Blocks


@pytest.mark.parametrize(
    "rows, kind", [(512, GGMLQuantizationType.Q4_K), (9000, GGMLQuantizationType.Q6_K)]
)
def test_blocks_are_random_weights(rows: int, kind: GGMLQuantizationType) -> None:
    columns = 1024
    blocks = Blocks(seed=1)
    data, found = blocks.tensor(rows, columns)
    weights = quants.dequantize(data[:256], found)
    assert found == kind and data.shape[0] == rows and weights.shape == (256, columns)
    assert abs(weights.mean()) < 0.03 * columns**-0.5
    assert weights.std() == pytest.approx(columns**-0.5, rel=0.02)
    assert blocks.tensor(rows, columns)[0] is data, "of one shape there is one"
    assert not quants.dequantize(np.zeros_like(data[:1]), found).any(), "zero bits are zero"
