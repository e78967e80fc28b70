"""Makes `tests/data/definitions/tensors.json`: names and shapes of the tensors of published models.

    python -m tools.reference.make_definition_tensors

Needs PyTorch and transformers: each configuration of `published.json` becomes a model without
values, and its tensors get the names that transformers saves them by. The file is committed, as
`{model: {name with {} for numbers: [[shape, [range of each number]], …]}}`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]
from transformers.core_model_loading import (  # type: ignore[import-not-found]
    revert_weight_conversion,
)

DATA = Path(__file__).parents[2] / "tests/data/definitions"
REFUSED = (
    "Llama-3.1-405B-Instruct-FP8",
    "Mistral-Small-4-MLX-4bit",
    "Qwen-72B-Chat",
    "openPangu-7B",
)
"""Parts that are not converted, some of which transformers has no model for."""
Groups = dict[str, list[list[Any]]]


def main() -> None:
    transformers.logging.set_verbosity_error()
    configs: Mapping[str, dict[str, Any]] = json.loads((DATA / "published.json").read_text())
    found = {
        name: compact(shapes(config)) for name, config in configs.items() if name not in REFUSED
    }
    lines = (f" {json.dumps(k)}: {json.dumps(v)}" for k, v in found.items())
    (DATA / "tensors.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def shapes(values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    kind = getattr(transformers, values["architectures"][0])
    values = {key: value for key, value in values.items() if key != "quantization_config"}
    values["model_type"] = kind.config_class.model_type  # For Kimi, whose code is DeepSeek-V3's.
    config = kind.config_class.from_dict(values)
    with torch.device("meta"):
        model = kind(config)
    model.tie_weights()
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    saved = revert_weight_conversion(model, state)
    return {name: tuple(tensor.shape) for name, tensor in sorted(saved.items())}


def compact(found: Mapping[str, tuple[int, ...]]) -> Groups:
    """Group names by pattern, with the numbers that each shape has."""
    groups: defaultdict[tuple[str, tuple[int, ...]], list[tuple[int, ...]]] = defaultdict(list)
    for name, shape in found.items():
        numbers = tuple(int(n) for n in re.findall(r"(?<=\.)\d+(?=\.)", name))
        groups[re.sub(r"(?<=\.)\d+(?=\.)", "{}", name), shape].append(numbers)
    result: Groups = defaultdict(list)
    for (pattern, shape), places in groups.items():
        axes = [sorted(set(axis)) for axis in zip(*places, strict=True)]
        assert set(product(*axes)) == set(places), pattern
        result[pattern].append([list(shape), [ranges(axis) for axis in axes]])
    return dict(sorted(result.items()))


def ranges(numbers: Iterable[int]) -> str:
    """`0-3,5` for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in runs)


if __name__ == "__main__":
    main()
