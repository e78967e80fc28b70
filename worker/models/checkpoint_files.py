"""The files of a folder that make up a SafeTensors checkpoint.

The download, the converter, its manifest and the cache of conversions all use this one answer.
Blocking, but short: at most an index of shards is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from worker.errors import ModelError
from worker.models.gguf.faults import stand_in
from worker.models.gguf.header import split_names
from worker.models.reference import is_projector

INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
TEMPLATES = "additional_chat_templates"
"""A folder of `*.jinja` files beside the weights."""
DENSE_MODULES = ("2_Dense", "3_Dense")
"""Folders with matrices that sentence-transformers multiplies an embedding by."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json")
"""Files that may hold the vocabulary."""
CONFIG_FILES = [*TOKENIZERS]
CONFIG_FILES += (
    "config.json generation_config.json tokenizer_config.json "
    "special_tokens_map.json added_tokens.json chat_template.jinja chat_template.json "
    "modules.json"
).split()
CONFIG_FILES += [
    f"{module}/{name}" for module in DENSE_MODULES for name in ("config.json", "model.safetensors")
]
"""Files besides the weights that a conversion depends on, if a checkpoint has them."""

_TEMPLATE = re.compile(rf"{TEMPLATES}/[^/]+\.jinja")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_POOLING = re.compile(r"[^/]*pooling/config\.json", re.IGNORECASE)
_SHARD = re.compile(r".*-(\d{5})-of-(\d{5})\.safetensors")


@contextmanager
def readable() -> Iterator[None]:
    """Raise `ModelError` for files that the system refuses to read, such as other users'."""
    try:
        yield
    except OSError as error:
        path = str(error.filename)
        raise ModelError(f"{path!r} cannot be read: {error.strerror}.", path=path) from None


@readable()
def checkpoint_files(folder: Path) -> list[Path]:
    """Every file that a conversion depends on, sorted by its path inside the folder.

    Raises `ModelError` if the folder has no weights, or lacks a shard.
    """
    small = [folder / name for name in (*CONFIG_FILES, INDEX)]
    small += (folder / TEMPLATES).glob("*.jinja")
    small += (each for each in folder.glob("*/config.json") if is_pooling_config(each))
    return sorted([*(path for path in small if path.is_file()), *weight_files(folder)])


def is_pooling_config(path: Path) -> bool:
    """Whether a file configures the pooling of a sentence-transformers model."""
    return _POOLING.fullmatch(f"{path.parent.name}/{path.name}") is not None


def check_exists(path: Path) -> None:
    """Raises `ModelError` if there is no file or folder at this path."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        text = f"There is no file or folder {str(path)!r}."
        raise ModelError(text, path=str(path)) from None
    except (OSError, ValueError):
        pass  # reading it will report why


@readable()
def check_checkpoint(folder: Path) -> None:
    """Raises `ModelError` naming the first thing that a folder lacks for a conversion."""
    if not folder.is_dir():
        what = _fault(folder, "folder")
        raise ModelError(f"The folder {str(folder)!r} {what}.", path=str(folder))
    for path in (folder / name for name in (*CONFIG_FILES, INDEX)):
        # If a dangling link counted as absent, a damaged cache would silently make another model.
        if os.path.lexists(path):
            _check_file(path)
    if not (folder / "config.json").is_file():
        raise _not_a_checkpoint(folder, "it has no config.json")
    if lacks := no_tokenizer([path.name for path in folder.iterdir() if path.is_file()]):
        raise _not_a_checkpoint(folder, lacks)
    weight_files(folder)


def no_tokenizer(names: Collection[str]) -> str:
    """Why these files lack a vocabulary, as the end of a sentence; empty if they have one."""
    if not set(TOKENIZERS).isdisjoint(names):
        return ""
    own = next((name for name in sorted(names) if name.endswith(".tiktoken")), "")
    hint = f" ({own} can be read only by Python code beside it)" if own else ""
    return f"it has none of {', '.join(TOKENIZERS)}{hint}"


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ModelError(f"{path} {_fault(path, 'file')}", path=str(path))
    with path.open("rb") as file:
        if other := stand_in(file.read(24)):
            raise ModelError(f"{path} {other}", path=str(path))


def _fault(path: Path, wanted: str) -> str:
    """Why a path is not the wanted `file` or `folder`, as the end of a sentence."""
    if path.exists():
        return f"is not a {wanted}"
    return "is a dangling link" if path.is_symlink() else "does not exist"


def weight_files(folder: Path) -> list[Path]:
    """The `.safetensors` files that hold the weights; raises `ModelError` if one is missing."""
    present = {path.name for path in folder.iterdir() if path.is_file() or path.is_symlink()}
    names = weight_names(present, folder / INDEX)
    if not names:
        pickles = any(name.endswith((".bin", ".pt", ".pth")) for name in present)
        hint = "; it holds PyTorch pickles, which are not read" if pickles else ""
        raise _not_a_checkpoint(folder, f"it has no .safetensors file{hint}")
    missing = [name for name in names if name not in present]
    if missing:
        raise ModelError(
            f"shard {missing[0]} is missing in {folder}; {INDEX} lists it",
            path=str(folder / missing[0]),
        )
    if INDEX not in present:
        _check_numbering(folder, names)
    files = [folder / name for name in names]
    for path in files:
        _check_file(path)
    return files


def weight_names(present: Collection[str], index: Path) -> list[str]:
    """The files of the weights as transformers chooses them: `model.safetensors` alone if present
    and not a shard of the index; else the index's shards; else all top-level `.safetensors`."""
    shards = sorted(set(weight_map(index).values())) if INDEX in present else []
    if _WHOLE in present and _WHOLE not in shards:
        return [_WHOLE]
    if shards:
        return shards
    return sorted(name for name in present if name.endswith(".safetensors") and "/" not in name)


def checkpoint_names(present: Collection[str], index: Path) -> list[str]:
    """The files of a repository's checkpoint, the weights last; empty if it has no complete one.
    `present` are all of its files; an index among them is on this disk at `index`."""
    weights = weight_names(present, index)
    if not weights or "config.json" not in present or no_tokenizer(present):
        return []
    small = [name for name in CONFIG_FILES if name in present]
    small += sorted(
        name for name in present if _TEMPLATE.fullmatch(name) or _POOLING.fullmatch(name)
    )
    return [*small, *weights]


def weight_map(index: Path) -> dict[str, str]:
    """The shard of each tensor in the index; raises `ModelError` if it has no map or names a file
    elsewhere."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ModelError(f"{index} has no weight_map of tensor and file names", path=str(index))
    if not found:
        raise ModelError(f"{index} has a weight_map without any tensor", path=str(index))
    for name in found.values():
        if "/" in name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names the invalid shard {name!r}", path=str(index))
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `ModelError` if there is no such file or object."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if _SURROGATE.search(text):  # UTF-8 has no lone surrogates
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}", path=str(path)) from None
    except NotADirectoryError:
        raise ModelError(f"{path.parent} is not a folder", path=str(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}", path=str(path)) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object", path=str(path))
    return value


def _check_numbering(folder: Path, names: Iterable[str]) -> None:
    """Find missing shards without an index, by names such as `model-00001-of-00003`."""
    numbered = [match for name in names if (match := _SHARD.fullmatch(name))]
    total = max((int(match[2]) for match in numbered), default=0)
    missing = sorted(set(range(1, total + 1)) - {int(match[1]) for match in numbered})
    if missing:
        raise ModelError(f"{folder} lacks shard {missing[0]} of {total}", path=str(folder))


def _not_a_checkpoint(folder: Path, what: str) -> ModelError:
    files = (path.name for path in folder.glob("*.gguf") if path.is_file())
    ggufs = sorted({split_names(name)[0] for name in files if not is_projector(name)})
    hint = f"; to serve a GGUF in it, give its path: {folder / ggufs[0]}" if ggufs else ""
    hint += f" (others: {', '.join(ggufs[1:])})" if ggufs[1:] else ""
    return ModelError(
        f"The folder {str(folder)!r} is not a SafeTensors model: {what}{hint}.", path=str(folder)
    )
