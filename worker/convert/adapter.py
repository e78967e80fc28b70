"""Converts a PEFT LoRA adapter into a GGUF adapter for one base model.

An adapter's matrices are converted like the weights that they change: the family's table gives the
GGUF name, the rows of a fused weight and the order of rotary heads. An adapter with anything that
llama.cpp cannot add (DoRA, whole modules, embeddings, experts) is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Set
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import Keys

from worker.convert.architectures import FAMILIES
from worker.convert.checkpoint import READABLE, Checkpoint
from worker.convert.config import MOST, Config
from worker.convert.family.rules import Into, Metadata, Place
from worker.convert.malformed import bounded_faults
from worker.convert.output import OutputFile
from worker.convert.quantize import encode, is_finite, to_float32
from worker.convert.safetensors import read_header
from worker.convert.tensor_plan import OutputTensor, interleaved
from worker.errors import ModelError
from worker.models.adapter import CONFIG, WEIGHTS
from worker.models.checkpoint_files import read_json
from worker.models.gguf.header import GgufHeader

_PART = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "layer_replication": "repeated layers",
    "trainable_token_indices": "trained tokens",
    "modules_to_save": "whole modules beside the matrices",
    "lora_bias": "a bias beside the matrices",
    "fan_in_fan_out": "transposed weights",
    "alora_invocation_tokens": "tokens that switch it on",
    "target_parameters": "matrices for bare parameters",
    "kasa_config": "singular values of its own, and a base without its smallest ones",
}
_OF_ANOTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations (`init_lora_weights`) that first take a part out of the base's weights."""
Matrix = npt.NDArray[np.float32]
Pair = tuple[str, Matrix, Matrix]
"""The name of a base model's weight, then a (rank, inputs) and b (outputs, rank) of its change
`b @ a * alpha / rank`."""


def convert_adapter(folder: Path, base: GgufHeader, target: Path, *, overwrite: bool = True) -> int:
    """Write the adapter in `folder` for the model `base`; returns the number of adapted weights.

    Raises:
        ModelError: the adapter is of another kind or does not fit the model; nothing is written.
    """
    with bounded_faults(folder):
        config = Config(read_json(folder / CONFIG), str(folder / CONFIG))
        _check_kind(folder, config)
        pairs = _pairs(folder, config, base)
    matrices: dict[str, Matrix] = {}
    for name, a, b in pairs:
        if f"{name}.lora_a" in matrices:
            raise ModelError(f"Two modules of the adapter {str(folder)!r} adapt {name}.")
        matrices |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
    metadata: Metadata = {
        Keys.General.TYPE: gguf.GGUFType.ADAPTER,
        Keys.General.NAME: folder.resolve().name,
        Keys.Adapter.TYPE: "lora",
        Keys.Adapter.LORA_ALPHA: config.number("lora_alpha"),
    }
    tensors = [OutputTensor(n, matrix.shape, (), kind="F32") for n, matrix in matrices.items()]
    target.parent.mkdir(parents=True, exist_ok=True)
    with OutputFile(target, overwrite=overwrite) as out:
        for tensor in out.write_header(base.architecture, metadata, tensors):
            data = encode(matrices[tensor.name], tensor.kind)
            if not is_finite(data, tensor.kind):
                raise ModelError(
                    f"The matrix {tensor.name} of the adapter {str(folder)!r} has a NaN or an "
                    "infinity, with which no answer can be computed.",
                    path=str(folder),
                )
            out.write(data, tensor.offset)
        out.seal()
        out.commit()
    return len(pairs)


def _check_kind(folder: Path, config: Config) -> None:
    def refuse(what: str) -> ModelError:
        return ModelError(f"The adapter {str(folder)!r} {what}.", path=str(folder))

    if config.values.get("peft_type") != "LORA":
        given = config.values.get("peft_type")
        raise refuse(f"is of the type {given!r:.80}; only LORA can be converted")
    for key, what in _REFUSED.items():
        if config.values.get(key):
            raise refuse(f"has {what} ({key}), which llama.cpp's adapters have no place for")
    init = str(config.values.get("init_lora_weights")).lower()
    if init.startswith(_OF_ANOTHER_BASE):
        raise refuse(
            f"is for a base that its training changed (init_lora_weights {init!r}); save it with "
            "PEFT as a plain LoRA"
        )
    if config.values.get("bias", "none") != "none":
        raise refuse("trains biases, which llama.cpp's adapters have no place for")
    if not config.number("lora_alpha"):
        raise refuse("has no lora_alpha above 0")


def _pairs(folder: Path, config: Config, base: GgufHeader) -> list[Pair]:
    path = folder / WEIGHTS
    infos = {info.name: info for info in read_header(path)}
    parts: dict[str, dict[str, Matrix]] = {}
    with closing(Checkpoint(folder, {}, infos)) as source:
        for name, info in infos.items():
            match = _PART.fullmatch(name)
            if match is None:
                raise ModelError(f"The tensor {name!r} of {path} is not a matrix of a LoRA.")
            if info.dtype not in READABLE or len(info.shape) != 2:
                raise ModelError(f"The tensor {name!r} of {path} is not a matrix of floats.")
            parts.setdefault(match[1], {})[match[2]] = to_float32(source.read(info))
    pairs = []
    for module, found in parts.items():
        if set(found) != {"A", "B"} or found["A"].shape[0] != found["B"].shape[1]:
            raise ModelError(f"The module {module!r} of {path} needs two matrices of one rank.")
        factor = _factor(config, module, found["A"].shape[0])
        if not abs(factor) < MOST:  # False for a NaN.
            raise ModelError(f"The scale of the module {module!r} of {path} is {factor}.")
        b = found["B"] * np.float32(factor)
        pairs += list(_placed(module, found["A"], b, base, path))
    if not pairs:
        raise ModelError(f"The file {path} holds no matrices.", path=str(path))
    return pairs


def _factor(config: Config, module: str, rank: int) -> float:
    """The module's own scale, relative to the `lora_alpha / rank` that llama.cpp applies to all."""

    def of(key: str, default: float) -> float:
        patterns = config.section(key)
        for pattern in patterns.values:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return patterns.number(pattern)
        return default

    alpha = of("alpha_pattern", config.number("lora_alpha"))
    wanted = alpha / (math.sqrt(rank) if config.flag("use_rslora") else rank)
    return wanted / (config.number("lora_alpha") / rank)


def _placed(module: str, a: Matrix, b: Matrix, base: GgufHeader, path: Path) -> Iterator[Pair]:
    """One pair for each weight of the base model that the module's weight is converted to."""
    shapes = {tensor.name: tensor.shape for tensor in base.tensors}
    for rule, name in _rules(module, base, shapes.keys(), path):
        i, n = rule.part
        rows = b[len(b) * i // n : len(b) * (i + 1) // n]
        if shapes.get(name) != (a.shape[1], rows.shape[0]):
            raise ModelError(
                f"The module {module!r} of {path} adapts a weight of {rows.shape[0]} x "
                f"{a.shape[1]}; {str(base.path)!r} has "
                + (f"{name} with {shapes[name]}." if name in shapes else f"no {name}."),
                path=str(path),
            )
        if rule.interleaved:
            rows = interleaved(rows, _head_dim(base))
        yield name, a, np.ascontiguousarray(rows)


def _rules(module: str, base: GgufHeader, there: Set[str], path: Path) -> list[tuple[Into, str]]:
    """The rules for the module's weight, with the names in the GGUF. Several families may have the
    same architecture: the first whose names are all in `there` is used, else the first."""
    at, found = Place.of(f"{module}.weight"), []
    for family in FAMILIES:
        rules = family.becomes(at.form) if family.architecture == base.architecture else None
        if rules and at.layer >= 0 > at.member and not any(rule.make for rule in rules):
            found.append([(rule, rule.target.replace("{i}", str(at.layer))) for rule in rules])
    if not found:
        raise ModelError(
            f"The module {module!r} of {path} cannot be adapted in a model of the architecture "
            f"{base.architecture!r}.",
            path=str(path),
        )
    return next((each for each in found if there >= {name for _, name in each}), found[0])


def _head_dim(base: GgufHeader) -> int:
    own = (base.embedding_length or 0) // (base.head_count or 1)
    return base.unsigned(Keys.Attention.KEY_LENGTH) or own
