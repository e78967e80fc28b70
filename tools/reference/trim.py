"""`python -m tools.reference.trim FOLDER OUT`: a tokenizer's definition without its bulk.

Its definition stays as published: normalizer, pre-tokenizer, post-processor, decoder, the model's
flags, added tokens and all ids. The vocabulary keeps the byte alphabet and the first merges, and
the first of numbered placeholders (`<|reserved_special_token_7|>`).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

N_MERGES = 300
_NUMBERED = re.compile(r"\D*(placeholder|place▁holder|reserved)\D*\d+\D*")


def trimmed(tokenizer: dict[str, Any]) -> dict[str, Any]:
    model = tokenizer["model"]
    kept = {t for t in model["vocab"] if len(t) == 1 or re.fullmatch("<0x[0-9A-F]{2}>", t)}
    merges = []
    for merge in model["merges"][:N_MERGES]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if left in kept and right in kept:
            kept.add(left + right)
            merges.append(merge)
    added = [token for token in tokenizer["added_tokens"] if not _is_surplus(token["content"])]
    ids = {token["content"]: token["id"] for token in added}
    vocab = {text: i for text, i in model["vocab"].items() if text in kept} | ids
    in_order = dict(sorted(vocab.items(), key=lambda item: item[1]))
    return {
        **tokenizer,
        "added_tokens": added,
        "model": {**model, "vocab": in_order, "merges": merges},
    }


def trimmed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return `tokenizer_config.json` without the same placeholders."""
    added = settings.get("added_tokens_decoder")
    if added is None:
        return settings
    kept = {i: token for i, token in added.items() if not _is_surplus(token["content"])}
    return {**settings, "added_tokens_decoder": kept}


def _is_surplus(text: str) -> bool:
    return _NUMBERED.fullmatch(text) is not None and not re.search(r"\D0+\D", text)


if __name__ == "__main__":
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    for name, trim in (("tokenizer.json", trimmed), ("tokenizer_config.json", trimmed_settings)):
        source = json.loads((folder / name).read_text("utf-8"))
        text = json.dumps(trim(source), ensure_ascii=False, separators=(",", ":"))
        (target / name).write_text(text + "\n", "utf-8")
