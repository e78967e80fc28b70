"""Makes `tests/data/tiktoken`: a small `tiktoken.model` and tiktoken's ids for some texts.

    python -m tools.reference.make_tiktoken_data

Needs tiktoken, which nothing else does; the data is committed. The expression is the one of
`tokenization_kimi.py` in moonshotai/Kimi-K2-Instruct (Modified MIT), whose parts it joins by `|`.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from pathlib import Path

import tiktoken  # type: ignore[import-not-found]

from worker.convert.tokenizer.corpus import TEXTS

DATA = Path(__file__).parents[2] / "tests/data/tiktoken"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_PREFIX}{_UPPER}*{_LOWER}+{_ENDING}",
        f"{_PREFIX}{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
N_MERGES = 400
SPECIAL = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>")


def main() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [[bytes([b]) for b in word.encode()] for t in TEXTS for word in t.split(" ")]
    for _ in range(N_MERGES):
        pairs = Counter(p for word in words for p in zip(word, word[1:], strict=False))
        (left, right), _count = pairs.most_common(1)[0]
        ranks[left + right] = len(ranks)
        for word in words:
            for i in range(len(word) - 1, 0, -1):
                if i < len(word) and (word[i - 1], word[i]) == (left, right):
                    word[i - 1 : i + 1] = [left + right]
    special = {text: len(ranks) + i for i, text in enumerate(SPECIAL)}
    encoding = tiktoken.Encoding(
        "kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
    )
    DATA.mkdir(exist_ok=True)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (DATA / "tiktoken.model").write_text("".join(lines))
    decoder = {str(i): {"content": text, "special": True} for text, i in special.items()}
    settings = {"bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": decoder}
    (DATA / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    texts = [*TEXTS, "<|im_user|>ÜBER नमस्ते<|im_end|>"]
    expected = [[text, encoding.encode(text, allowed_special="all")] for text in texts]
    lines = (json.dumps(entry, ensure_ascii=False) for entry in expected)
    (DATA / "expected.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
