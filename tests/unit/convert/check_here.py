"""Compares token ids in the test's own process.

The converter does it in a child, whose start takes longer than the rest of a small conversion.
Tests that need the child keep it, and so does every conversion in a separate process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from worker.convert.family.rules import Metadata
from worker.convert.output import write_layout
from worker.convert.tensor_plan import OutputTensor
from worker.convert.tokenizer import check
from worker.convert.tokenizer.reference import reference


class CheckHere(check.TokenCheck):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __exit__(self, *_: object) -> None:
        pass

    def check(
        self,
        architecture: str,
        metadata: Metadata,
        tensors: Sequence[OutputTensor] = (),
    ) -> check.CheckedTokens:
        with tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary) / "model.gguf"
            write_layout(file, architecture, metadata, tensors=tensors)
            return check._compare(file, reference(self._folder))
