"""The form of all errors about a GGUF file's content, and guesses what another file may be."""

from __future__ import annotations

from pathlib import Path

from worker.errors import ModelError


def check_magic(path: Path, head: bytes, size: int) -> None:
    """Raises `ModelError` for a file that is not a GGUF, by its first 24 bytes and its size."""
    if head[:4] == b"GGUF":
        if size < 24:
            raise unusable(path, f"it ends after {size} bytes, inside the header of 24 bytes")
        return
    if size == 0:
        what = "it is empty"
    elif other := stand_in(head):
        what = f"it {other}"
    elif head[:4] in (b"lmgg", b"tjgg", b"algg", b"fmgg"):
        what = "it is in the old GGML format; convert the original model to GGUF"
    elif head[8:9] == b"{":
        what = "it looks like SafeTensors; give its folder, which the worker converts"
    else:
        what = f"it begins with {head[:4].decode('latin-1')!r} instead of 'GGUF'"
    raise unusable(path, what)


def stand_in(head: bytes) -> str:
    """What lies in place of a model's file that was not fetched, by its first 24 bytes, as the end
    of a sentence; empty if it may be the file itself."""
    if head.startswith(b"version https://git"):
        return "is a Git LFS pointer; fetch the file itself with `git lfs pull`"
    if head.lstrip()[:16].lower().startswith((b"<!doctype", b"<html")):
        return "is a web page; the download link did not lead to the file"
    return ""


def unusable(path: Path, what: str) -> ModelError:
    """The error for a file with invalid content; `what` completes its sentence."""
    return ModelError(f"{str(path)!r} is not a usable GGUF file: {what}.", path=str(path))
