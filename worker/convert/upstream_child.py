"""The process in which llama.cpp's own converter runs; see `upstream`.

Prints, as one line of JSON, the SHA-256 of the bytes that the script meant each tensor to have.
"""

from __future__ import annotations

import hashlib
import json
import resource
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from worker.background import die_with_parent

_NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")


def main() -> None:
    limit, scripts, source, target, outtype, *flags = sys.argv[1:]
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
    sys.addaudithook(_without_network)
    sys.path[:0] = [scripts, f"{scripts}/gguf-py"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        del sys.modules[name]  # The script's own is newer.
    meant = _record(Path(target))
    _patch()
    _keep_settings()
    sys.argv = ["convert_hf_to_gguf.py", source, "--outfile", target, "--outtype", outtype]
    sys.argv += flags
    runpy.run_path(f"{scripts}/convert_hf_to_gguf.py", run_name="__main__")
    print(json.dumps(meant))


def _without_network(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in _NETWORK:
        raise PermissionError("a conversion uses no network")


def _record(target: Path) -> dict[str, str]:
    """Make the script's writer record the digest of every tensor that it writes to `target`; some
    models' adapters go to other files."""
    from gguf import gguf_writer, lazy, quants

    found: dict[str, str] = {}

    class Meant:
        def __init__(self, name: str, tensor: Any) -> None:
            self.name, self.tensor, self.nbytes = name, tensor, tensor.nbytes

        def tofile(self, file: Any) -> None:
            digest = hashlib.sha256()
            for part in self.parts():
                digest.update(np.ascontiguousarray(part).data.cast("B"))
                part.tofile(file)
            found[self.name] = digest.hexdigest()

        def parts(self) -> Iterator[Any]:
            tensor = self.tensor
            if not isinstance(tensor, lazy.LazyChunkedTensor):
                yield lazy.LazyNumpyTensor.to_eager(tensor)
                return
            for load in tensor._chunks:
                part = load()
                yield part if tensor._qtype is None else quants.quantize(part, tensor._qtype)

    write = gguf_writer.GGUFWriter.write_tensors_to_file

    def recorded(self: Any, **settings: Any) -> None:
        for tensors in self.tensors if self.path == target else ():
            for name, info in tensors.items():
                info.tensor = Meant(name, info.tensor)
        write(self, **settings)

    gguf_writer.GGUFWriter.write_tensors_to_file = recorded
    return found


def _patch() -> None:
    """Patch the script. A vocabulary that it cannot read must not stop it: ours replaces it, and
    token ids are compared with the source's own tokenizer in any case. A projector of Pixtral's
    kind needs a row of the token embeddings, which the script ignores."""
    import conversion  # type: ignore[import-not-found]

    original = conversion.get_model_class

    def patched(name: str, mmproj: bool = False) -> Any:
        kind = original(name, mmproj)
        if mmproj:
            if hasattr(kind, "img_break_tok_id"):
                passed = kind.filter_tensors
                kind.filter_tensors = staticmethod(
                    lambda item: item if item[0].endswith("embed_tokens.weight") else passed(item)
                )
            return kind
        read = kind.set_vocab

        def set_vocab(self: Any) -> None:
            try:
                read(self)
            except Exception as error:
                print(f"vocabulary: {type(error).__name__}: {error}", file=sys.stderr)

        kind.set_vocab = set_vocab
        return kind

    conversion.get_model_class = patched


def _keep_settings() -> None:
    """Give the script those settings of `config.json` that transformers drops on reading."""
    from conversion import ModelBase

    original = ModelBase.load_hparams

    def load(folder: Path, is_mistral_format: bool) -> dict[str, Any]:
        file = folder / ("params.json" if is_mistral_format else "config.json")
        return {**json.loads(file.read_text("utf-8")), **original(folder, is_mistral_format)}

    ModelBase.load_hparams = staticmethod(load)


if __name__ == "__main__":
    main()
