"""Random weights generated directly in their quantised format: 8 billion of them in seconds.

The layouts are ggml's (`block_q4_K`, `block_q6_K` of ggml-common.h): 256 weights a block. All
blocks have the same scales, chosen so that the weights have mean 0 and the standard deviation of
the usual initialisation, 1 / sqrt(columns). Matrices of the same shape are the same matrix: the
cost of a step does not depend on the values of the weights. Runs in the benchmark's process.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType

QUANT = "Q4_K_M"
BLOCK = 256
SCALE_4 = 32
"""Scale of all eight sub-blocks of a Q4_K block, and of their offsets."""
SCALE_6 = 8
DEVIATION_4, DEVIATION_6 = (16**2 - 1) ** 0.5 / 12**0.5, (64**2 - 1) ** 0.5 / 12**0.5
"""Standard deviations of uniform integers below 16 and below 64."""
TALL = 8
"""A matrix with this many times as many rows as columns belongs to the vocabulary, which Q4_K_M
stores in Q6_K."""


class Blocks:
    """Matrices of random blocks, each shape drawn once."""

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._random = np.random.default_rng(seed)
        self.tensor = cache(self._tensor)

    def _tensor(self, rows: int, columns: int) -> tuple[np.ndarray, GGMLQuantizationType]:
        """Return the bytes, one row of the array for each row of the matrix, and their type."""
        from gguf import GGMLQuantizationType

        tall = rows > TALL * columns
        blocks = self._q6(rows, columns) if tall else self._q4(rows, columns)
        kind = GGMLQuantizationType.Q6_K if tall else GGMLQuantizationType.Q4_K
        return blocks.reshape(rows, -1), kind

    def _q4(self, rows: int, columns: int) -> np.ndarray:
        """weight = d * scale * q - dmin * offset, q of 0 to 15."""
        d = columns**-0.5 / DEVIATION_4 / SCALE_4
        header = _halves(d, d * 7.5)
        # 12 bytes of six bits each: eight scales, eight offsets, in ggml's packing.
        high = (SCALE_4 >> 4) << 6
        header += bytes([high | SCALE_4] * 8 + [(SCALE_4 & 15) | (SCALE_4 & 15) << 4] * 4)
        return self._blocks(rows, columns, header, 128, b"")

    def _q6(self, rows: int, columns: int) -> np.ndarray:
        """weight = d * scale * (q - 32), q of 0 to 63."""
        d = columns**-0.5 / DEVIATION_6 / SCALE_6
        return self._blocks(rows, columns, b"", 192, bytes([SCALE_6] * 16) + _halves(d))

    def _blocks(
        self, rows: int, columns: int, header: bytes, n_drawn: int, footer: bytes
    ) -> np.ndarray:
        import numpy as np

        drawn = self._random.bytes(rows * columns // BLOCK * n_drawn)
        blocks = np.frombuffer(drawn, np.uint8).reshape(-1, n_drawn)
        sides = [
            np.broadcast_to(np.frombuffer(side, np.uint8), (len(blocks), len(side)))
            for side in (header, footer)
        ]
        return np.concatenate([sides[0], blocks, sides[1]], axis=1)


def _halves(*numbers: float) -> bytes:
    import numpy as np

    return np.array(numbers, "<f2").tobytes()
