"""Resolves the files of `--lora` to local GGUF adapters that fit the model.

Runs on the API process's event loop; reading goes to a thread, a conversion to a child process.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from worker.errors import ModelError, of_flag
from worker.models.checkpoint_files import check_exists
from worker.models.conversion import content_key, convert_once
from worker.models.gguf.constants import constants
from worker.models.gguf.header import GgufHeader, read_header
from worker.models.gguf.servable import check_types
from worker.wire.adapters import Adapter
from worker.wire.messages import OnProgress, Progress

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


async def resolve_adapters(
    wanted: Sequence[Adapter],
    base: GgufHeader,
    cache_dir: Path,
    on_progress: OnProgress = lambda progress: None,
) -> tuple[Adapter, ...]:
    """The adapters with the paths and sizes of their GGUFs; folders from PEFT are converted.

    Raises `ModelError` if an adapter does not exist or does not fit the model.
    """
    found = []
    for adapter in wanted:
        path = Path(os.path.expanduser(adapter.path)).absolute()
        with of_flag("--lora"):
            if await asyncio.to_thread(os.path.isdir, path):
                header = await _converted(path, base, cache_dir, on_progress)
            else:
                await asyncio.to_thread(check_exists, path)
                header = await asyncio.to_thread(read_header, path)
                check_adapter(header, base)
        found.append(replace(adapter, path=str(header.path), size_bytes=header.size_bytes))
    return tuple(found)


def check_adapter(header: GgufHeader, base: GgufHeader) -> None:
    """Refuse a file that is not an adapter of this model, before native code sees it."""
    path, keys = str(header.path), constants().Keys

    def refusal(sentence: str) -> ModelError:
        return ModelError(sentence, path=path)

    kind, form = (header.metadata.get(key) for key in (keys.General.TYPE, keys.Adapter.TYPE))
    if (kind, form) != ("adapter", "lora"):
        raise refusal(f"{path!r} is not a LoRA adapter.")
    alpha = header.metadata.get(keys.Adapter.LORA_ALPHA, 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha):
        raise refusal(
            f"{path!r} is not a usable LoRA adapter: its alpha is {alpha} and must be a finite "
            "floating-point number."
        )
    if keys.Adapter.ALORA_INVOCATION_TOKENS in header.metadata:
        raise refusal(
            f"The adapter {path!r} applies only after its invocation tokens (aLoRA), which is not "
            "supported; train one that always applies."
        )
    check_types(header)
    shapes = {tensor.name: tensor.shape for tensor in base.tensors}
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in header.tensors:
        name, _, part = tensor.name.rpartition(".")
        pairs.setdefault(name, {})[part] = tensor.shape
    for name, parts in pairs.items():
        if name == "token_embd.weight":
            # llama.cpp expects its factors transposed, and aborts if the output is tied to it.
            raise refusal(
                f"The adapter {path!r} changes the token embeddings, which is not supported; "
                "train one without them."
            )
        factors = parts.get("lora_a", ()), parts.get("lora_b", ())
        if header.architecture != base.architecture or not _fit(*factors, shapes.get(name, ())):
            raise refusal(
                f"The adapter {path!r} is not for {str(base.path)!r}: {name} does not fit."
            )


def _fit(a: tuple[int, ...], b: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether the product of the factors `a` and `b` has the shape of the weight.

    Shapes are in GGUF's order: the length of a row comes first, the number of experts third.
    """
    if not 2 <= len(weight) == len(a) == len(b):
        return False
    return a[1] == b[0] and (a[0], b[1]) == weight[:2] and a[2:] == b[2:] == weight[2:]


async def _converted(
    folder: Path, base: GgufHeader, cache_dir: Path, on_progress: OnProgress
) -> GgufHeader:
    files = [folder / CONFIG, folder / WEIGHTS]
    for file in files:
        if not file.is_file():
            raise ModelError(
                f"The folder {str(folder)!r} is not a LoRA adapter: it has no {file.name}.",
                path=str(folder),
            )
    on_progress(Progress("adapter", 0.0))
    heads = (base.architecture, base.head_count, base.head_count_kv, base.embedding_length)
    key_now = partial(content_key, folder, files, repr(heads), cache_dir)

    def arguments(written: str) -> Sequence[str]:
        return ("adapter", str(folder), str(base.path), written)

    check = partial(check_adapter, base=base)
    return await convert_once(cache_dir, "adapter.gguf", arguments, check, key_now, on_progress)
