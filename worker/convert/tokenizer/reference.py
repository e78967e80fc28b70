"""The source's own tokenizer, as the `tokenizers` library reads it. Used in the check's process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.convert.checkpoint import Checkpoint
from worker.convert.tokenizer.protobuf import SentencePieceModel, read_model
from worker.convert.tokenizer.ranked import TEKKEN, ranked_definition, tekken_override
from worker.convert.tokenizer.sentencepiece import scheme_of
from worker.convert.tokenizer.vocabulary import SPACE
from worker.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def reference(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint's folder; raises `ModelError` if the library refuses it."""
    from tokenizers import Tokenizer

    path, source = folder / "tokenizer.json", folder / "tokenizer.model"
    checkpoint = Checkpoint(folder, {}, {})
    try:
        if path.is_file():
            tokenizer = Tokenizer.from_buffer(path.read_bytes())
            whole = checkpoint.json(path.name) if checkpoint.json(TEKKEN) else {}
            if cuts := tekken_override(checkpoint, whole):
                tokenizer = Tokenizer.from_str(json.dumps({**whole, "pre_tokenizer": cuts}))
        elif other := ranked_definition(checkpoint):
            other["model"]["vocab"] |= {t["content"]: t["id"] for t in other["added_tokens"]}
            tokenizer = Tokenizer.from_str(json.dumps(other))
        elif source.is_file():
            model = read_model(source.read_bytes(), str(source))
            scheme = scheme_of(model, checkpoint.json("tokenizer_config.json"))
            tokenizer = _from_sentencepiece(model, scheme)
        else:
            raise ModelError(f"{folder} has no tokenizer whose ids can be compared")
    except (ModelError, KeyboardInterrupt):
        raise
    except BaseException as error:  # A panic of the library is not an `Exception`.
        raise ModelError(
            f"the tokenizer in {folder} is refused by the tokenizers library: {error}"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_sentencepiece(model: SentencePieceModel, scheme: str) -> Tokenizer:
    """Build the library's tokenizer for a checkpoint that has only a `tokenizer.model`; `scheme` is
    that of `sentencepiece.scheme_of`."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    steps: list[Any] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if scheme == "always":
        steps.append(normalizers.Prepend(SPACE))
    if scheme != "first":
        steps.append(normalizers.Replace(" ", SPACE))
    has_bytes = any(piece.kind == 6 for piece in model.pieces)
    if model.algorithm == 2:
        vocab = {piece.text: i for i, piece in enumerate(model.pieces)}
        merges, unk = _merges(model, vocab), model.pieces[model.unk_id].text
        tokenizer = Tokenizer(
            models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=has_bytes)
        )
    else:
        scored = [(piece.text, piece.score) for piece in model.pieces]
        tokenizer = Tokenizer(models.Unigram(scored, model.unk_id, has_bytes))
    tokenizer.normalizer = normalizers.Sequence(steps)
    if scheme == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Replace(SPACE, " ")
    return tokenizer


def _merges(model: SentencePieceModel, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes another piece, ordered by that piece's score, best first."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece in model.pieces:
        for cut in range(1, len(piece.text)):
            left, right = piece.text[:cut], piece.text[cut:]
            if left in vocab and right in vocab:
                found.append((-piece.score, vocab[left], vocab[right], left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]
