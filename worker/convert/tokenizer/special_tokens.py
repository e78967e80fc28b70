"""Special tokens of a checkpoint: the ids that begin, end and pad a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from gguf.constants import Keys

from worker.convert.checkpoint import Checkpoint
from worker.convert.config import Config
from worker.convert.family.rules import Metadata
from worker.convert.tokenizer.pre_tokenizers import steps_of
from worker.convert.tokenizer.vocabulary import Vocabulary
from worker.errors import ModelError

_SLOTS = {
    "bos": Keys.Tokenizer.BOS_ID,
    "eos": Keys.Tokenizer.EOS_ID,
    "unk": Keys.Tokenizer.UNK_ID,
    "sep": Keys.Tokenizer.SEP_ID,
    "pad": Keys.Tokenizer.PAD_ID,
    "mask": Keys.Tokenizer.MASK_ID,
    "cls": "tokenizer.ggml.cls_token_id",
}
"""GGUF's keys; the `gguf` package has none for `cls`."""

_ADDED = {"bos": Keys.Tokenizer.ADD_BOS, "eos": Keys.Tokenizer.ADD_EOS}

_ENDS_BY_NAME = frozenset(
    """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> </s>
    <|eom_id|> <EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|>""".split()
)
"""Texts that llama.cpp takes for the end of a generation in every vocabulary that has them."""


def special_tokens(
    checkpoint: Checkpoint, vocabulary: Vocabulary, *, embeds: bool = False
) -> Metadata:
    """The `tokenizer.ggml.*_token_id` and `add_*_token` keys.

    The end token of a model that `embeds` is the one that its post-processor appends.

    Raises:
        ModelError: a file names a BOS or EOS that is not a token, only ends beyond the vocabulary,
            or more ends than llama.cpp can hold.
    """
    ids = {role: i for role in _SLOTS if (i := _id_of(checkpoint, vocabulary, role)) is not None}
    ends = end_ids(checkpoint, vocabulary)
    if "cls" in ids:
        ids.setdefault("bos", ids["cls"])
    edges = _edges(checkpoint.json("tokenizer.json").get("post_processor"))
    surplus = [i for i in sum(edges or (), []) if not 0 <= i < len(vocabulary.tokens)]
    if surplus:
        what = f"adds the token {surplus[0]}, but there are {len(vocabulary.tokens)} tokens"
        raise ModelError(f"tokenizer.json: its post_processor {what}")
    found: Metadata = {}
    if edges and (embeds or vocabulary.model == "bert"):
        # What the post-processor adds: such a model uses no other beginning or end.
        before, after, between = edges
        found[Keys.Tokenizer.ADD_SEP] = is_separated = len(between) > len(after)
        if is_separated:
            ids["sep"] = between[-1]
        if before:
            ids["bos"] = before[0]
        if after:
            ids["eos"], ends = after[-1], [after[-1]]
            if vocabulary.model == "bert":
                ids["sep"] = after[-1]  # which llama.cpp appends, whatever EOS is
    if "eos" not in ids and ends:
        ids["eos"] = ends[0]
    lost = next((note for note in vocabulary.notes if "eos_token_id" in note), None)
    if lost and "eos" not in ids and not embeds and _ENDS_BY_NAME.isdisjoint(vocabulary.tokens):
        raise ModelError(f"{lost}, and no other token ends a text: the model would never stop")
    # llama.cpp has three slots for ends, and knows some other ends by their text.
    tokens = vocabulary.tokens
    unnamed = [i for i in ends if i != ids.get("eos") and tokens[i] not in _ENDS_BY_NAME]
    if len(unnamed) > 2:
        raise ModelError(
            f"generation_config.json has {len(ends)} eos_token_id; a GGUF has room for 3, and "
            f"llama.cpp knows others by name, but not {tokens[unnamed[2]]!r}"
        )
    found |= {_SLOTS[role]: i for role, i in ids.items()}
    found |= zip((Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID), unnamed, strict=False)
    for side, (role, key) in enumerate(_ADDED.items()):
        found[key] = _adds(checkpoint, role, ids, vocabulary, edges and edges[side])
    if ends:
        found["llorch.convert.eog_token_ids"] = ends
    return found


def end_ids(checkpoint: Checkpoint, vocabulary: Vocabulary) -> list[int]:
    """Every id that ends a generation; the tokenizer's own comes first."""
    named = _named(checkpoint, "eos")
    own = vocabulary.id_of(named) if named is not None else None
    ends = [own] if own is not None else []
    fallback = {} if ends else {"eos_token_id": vocabulary.special_ids.get("eos")}
    for file in (*_with_ids(checkpoint, "eos"), fallback):
        value = file.get("eos_token_id")
        for i in value if isinstance(value, list) else [value]:
            if _is_token(i, "eos", vocabulary) and i not in ends:
                ends.append(i)
    return ends


def _with_ids(checkpoint: Checkpoint, role: str) -> list[Mapping[str, Any]]:
    """The objects that have ids of a role, in transformers' order. `text_config` counts only if
    nothing else has any."""
    files: list[Mapping[str, Any]] = [
        checkpoint.json("generation_config.json"),
        checkpoint.config,
    ]
    found = [file for file in files if file.get(f"{role}_token_id") is not None]
    return found or [Config(checkpoint.config).section("text_config").values]


def _is_token(i: Any, role: str, vocabulary: Vocabulary) -> TypeGuard[int]:
    """Whether a file's id of a role is that of a token; adds a note if it is too large."""
    if type(i) is not int:
        return False
    if i >= len(vocabulary.tokens):
        note = f"left out {role}_token_id {i}: the vocabulary has {len(vocabulary.tokens)} tokens"
        if note not in vocabulary.notes:
            vocabulary.notes.append(note)
    return 0 <= i < len(vocabulary.tokens)


def _named(checkpoint: Checkpoint, role: str) -> str | None:
    """The text that the tokenizer's files give for a role."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        value = checkpoint.json(file).get(f"{role}_token")
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            return value
    return None


def _id_of(checkpoint: Checkpoint, vocabulary: Vocabulary, role: str) -> int | None:
    named = _named(checkpoint, role)
    if named is not None:
        if (i := vocabulary.id_of(named)) is not None:
            return i
        if role in ("bos", "eos"):
            raise ModelError(f"tokenizer_config.json: {role}_token {named!r} is not a token")
        vocabulary.notes.append(f"left out {role}_token {named!r}, which is not a token")
        return None
    for file in _with_ids(checkpoint, role):
        value = file.get(f"{role}_token_id")
        if isinstance(value, list):
            value = value[0] if value else None
        if _is_token(value, role, vocabulary):
            return value
    return vocabulary.special_ids.get(role)


def _adds(
    checkpoint: Checkpoint,
    role: str,
    ids: Mapping[str, int],
    vocabulary: Vocabulary,
    edge: Sequence[int] | None,
) -> bool:
    """Whether the tokenizer itself adds its BOS before, or its EOS after, a text; `edge` has the
    ids that its post-processor puts there."""
    is_bert = vocabulary.model == "bert"  # llama.cpp always adds both
    value = checkpoint.json("tokenizer_config.json").get(f"add_{role}_token")
    if isinstance(value, bool) and not is_bert:
        return value and role in ids
    if edge is None and not is_bert:
        # SentencePiece models begin with BOS unless a file says otherwise, and so do Mistral's.
        by_kind = vocabulary.model == "llama" or vocabulary.pre == "tekken"
        return role == "bos" and role in ids and by_kind
    at, where = (0, "before") if role == "bos" else (-1, "after")
    edge = edge or ()
    adds = is_bert or edge[at:][:1] == [ids.get(role)]
    if len(edge) != adds:
        own = vocabulary.tokens[ids[role]] if adds and role in ids else "nothing"
        whole = " ".join(vocabulary.tokens[i] for i in edge) or "nothing"
        vocabulary.notes.append(
            f"the tokenizer puts {whole} {where} a text, llama.cpp puts {own} there"
        )
    return adds


def _edges(post: Any) -> tuple[list[int], list[int], list[int]] | None:
    """The ids that a post-processor puts before and after a single text, and between two; `None` if
    it adds none."""
    for step in steps_of(post, "TemplateProcessing", "RobertaProcessing", "BertProcessing"):
        if step["type"] != "TemplateProcessing":
            sep = [step["sep"][1]]
            return [step["cls"][1]], sep, sep * (2 if step["type"] == "RobertaProcessing" else 1)
        before, after = _around_texts(step, "single")[:2]
        return before, after, _around_texts(step, "pair")[1]
    return None


def _around_texts(step: Mapping[str, Any], form: str) -> list[list[int]]:
    """The ids before, between and after the texts of a template."""
    parts: list[list[int]] = [[]]
    for piece in step.get(form) or ():
        if token := piece.get("SpecialToken"):
            parts[-1] += step["special_tokens"][token["id"]]["ids"]
        else:
            parts.append([])
    return [*parts, []]
