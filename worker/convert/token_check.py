"""Token ids of the converted vocabulary against those of the source's own tokenizer.

`TokenCheck` runs in the converter and starts this module as a process of its own, because llama.cpp
loads the vocabulary there: a vocabulary that it aborts on costs that process and nothing more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.convert import pre_tokenizers
from worker.convert.architectures import Metadata
from worker.convert.corpus import TEXTS
from worker.convert.output import header, write_header_to
from worker.convert.protobuf import SentencePieceModel, read_model
from worker.errors import ModelError, WorkerError
from worker.models.checkpoint_files import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TIMEOUT_SECONDS = 600


class TokenCheck:
    """Use as a context manager. The child reads the source's tokenizer while the caller still
    plans, and waits for the vocabulary that `check` gives it."""

    def __init__(self, folder: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> TokenCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()  # Without effect on a process that has ended.
        self._child.communicate()

    def check(self, architecture: str, metadata: Metadata) -> int:
        """The number of texts that agree; once only.

        Raises:
            ModelError: a text is split differently, or llama.cpp refuses the vocabulary.
        """
        with tempfile.TemporaryDirectory(prefix="llorch-convert-") as temporary:
            vocabulary = Path(temporary) / "vocabulary.gguf"
            write_header_to(header(architecture, metadata), vocabulary, with_tensors=True)
            try:
                stdout, stderr = self._child.communicate(f"{vocabulary}\n", TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                raise ModelError(
                    f"llama.cpp did not split the test texts in {TIMEOUT_SECONDS} s"
                ) from None
        try:
            answer = json.loads(stdout.splitlines()[-1])
        except (IndexError, json.JSONDecodeError):
            last = stderr.strip().splitlines()[-1:] or ["no reason was given"]
            raise ModelError(f"llama.cpp cannot load the vocabulary: {last[0]}") from None
        if "error" in answer:
            raise ModelError(str(answer["error"]), **answer.get("details", {}))
        return int(answer["n_texts"])


def main() -> None:
    answer: dict[str, Any]
    try:
        from worker.llama import library

        library.load()
        expected = _expected(Path(sys.argv[1]))
        vocabulary = sys.stdin.readline().strip()
        if not vocabulary:
            return  # The caller found another fault, and nobody waits for an answer.
        answer = {"n_texts": _compare(Path(vocabulary), expected)}
    except WorkerError as error:
        answer = {"error": error.message, "details": error.details}
    print(json.dumps(answer))


def _compare(vocabulary: Path, expected: Sequence[tuple[str, list[int]]]) -> int:
    from worker.llama.model import LoadOptions, Model

    model = Model(str(vocabulary), LoadOptions(vocab_only=True))
    if pre_tokenizers.splits_marks(model.metadata("tokenizer.ggml.pre") or ""):
        expected = [(text, ids) for text, ids in expected if not _has_marks(text)]
    for text, ids in expected:
        got = model.tokenize(text, add_special=False, parse_special=True)
        if got != ids:
            raise ModelError(
                f"the converted tokenizer differs from its source: {text!r} becomes {got} "
                f"instead of {ids}",
                text=text,
            )
    model.close()
    return len(expected)


def _has_marks(text: str) -> bool:
    return any(unicodedata.category(char)[0] == "M" for char in text)


def _expected(folder: Path) -> list[tuple[str, list[int]]]:
    """The corpus with the source tokenizer's ids, as far as they are the vocabulary's business.

    llama.cpp does not compose characters; a tokenizer that does gets composed text.
    """
    path = folder / "tokenizer.json"
    tokenizer = reference(folder)
    texts: tuple[str, ...] = TEXTS
    if '"NFC"' in (json.dumps(read_json(path).get("normalizer")) if path.is_file() else ""):
        texts = tuple(unicodedata.normalize("NFC", t) for t in texts)
    return [(t, list(tokenizer.encode(t, add_special_tokens=False).ids)) for t in texts]


def reference(folder: Path) -> Tokenizer:
    """The `tokenizers` library's reading of the source."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        source = folder / "tokenizer.model"
        return _from_sentencepiece(read_model(source.read_bytes(), str(source)))
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises no narrower class.
        raise ModelError(f"{path} is refused by the tokenizers library: {error}") from None


def _from_sentencepiece(model: SentencePieceModel) -> Tokenizer:
    """A tokenizer of the library's own for a checkpoint that has a `tokenizer.model` alone."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers

    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend("\u2581"))
    steps.append(normalizers.Replace(" ", "\u2581"))
    bytes_too = any(piece.kind == 6 for piece in model.pieces)
    if model.algorithm == 2:
        vocab = {piece.text: i for i, piece in enumerate(model.pieces)}
        tokenizer = Tokenizer(
            models.BPE(
                vocab,
                _merges(model, vocab),
                unk_token=model.pieces[model.unk_id].text,
                fuse_unk=True,
                byte_fallback=bytes_too,
            )
        )
    else:
        scored = [(piece.text, piece.score) for piece in model.pieces]
        tokenizer = Tokenizer(models.Unigram(scored, model.unk_id, bytes_too))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    return tokenizer


def _merges(model: SentencePieceModel, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best-scored piece first."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece in model.pieces:
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in vocab and right in vocab:
                found.append((-piece.score, vocab[left], vocab[right], left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


if __name__ == "__main__":
    main()
