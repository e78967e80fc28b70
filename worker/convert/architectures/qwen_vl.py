"""The text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen with three-dimensional positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gguf.constants import Keys

from worker.convert.architectures.qwen import QWEN2, QWEN3
from worker.convert.checkpoint import Checkpoint
from worker.convert.config import Config
from worker.convert.family.rules import Family, Metadata, Value
from worker.convert.family.sizes import Dims


def _sections(config: Config, d: Dims) -> Value:
    """How a head's frequencies are divided among three dimensions, which a text has as one."""
    given = config.rope().params.values.get("mrope_section") or [d.head_dim // 2, 0, 0]
    return [*map(int, given), 0, 0, 0, 0][:4]


def _notes(config: Config) -> Iterator[str]:
    """llama.cpp gives the frequencies to the dimensions in turn, and none of them the last ones of
    sections that are not as long as each other."""
    sections = config.rope().params.values.get("mrope_section") or [0]
    idle = sum(i >= 3 * sections[i % 3] for i in range(sum(sections)) if i % 3 < len(sections))
    if idle:
        yield f"llama.cpp does not rotate the last {idle} of a head's {sum(sections)} frequencies"


def _deepstack(checkpoint: Checkpoint, _d: Dims) -> Metadata:
    """From how many layers of the vision part the first layers of this one get features."""
    vision = Config(checkpoint.config).section("vision_config")
    return {Keys.LLM.NUM_DEEPSTACK_LAYERS: len(vision.values.get("deepstack_visual_indexes") or [])}


QWEN2_VL: Family = replace(
    QWEN2,
    architecture="qwen2vl",
    names=(),
    multimodal=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    metadata={Keys.Rope.DIMENSION_SECTIONS: _sections},
)

QWEN3_VL: Family = replace(
    QWEN3,
    architecture="qwen3vl",
    names=(),
    multimodal=("Qwen3VLForConditionalGeneration",),
    metadata={Keys.Rope.DIMENSION_SECTIONS: _sections},
    tensor_metadata=_deepstack,
    notes=_notes,
)
