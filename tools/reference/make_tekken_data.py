"""Makes `tests/data/tekken`: the beginning of Mistral's vocabulary and the ids of some texts.

    python -m tools.reference.make_tekken_data

Needs mistral-common (Apache-2.0), which ships the whole `tekken_240911.json` and its own tokenizer.
The first ranks of a vocabulary are a vocabulary too. `expected.json` has the ids of the texts of
`corpus` with the small one, `expected_whole.json` those with the whole one.
"""

from __future__ import annotations

import json
from pathlib import Path

from worker.convert.tokenizer.corpus import TEXTS

DATA = Path(__file__).parents[2] / "tests/data/tekken"
N_RANKS = 1000


def main() -> None:
    import mistral_common  # type: ignore[import-not-found]
    from mistral_common.tokens.tokenizers.tekken import (  # type: ignore[import-not-found]
        Tekkenizer,
    )

    whole = Path(mistral_common.__file__).parent / "data/tekken_240911.json"
    tekken = json.loads(whole.read_text("utf-8"))
    tekken["config"] |= {"num_vocab_tokens": N_RANKS, "default_vocab_size": N_RANKS + 1000}
    tekken["vocab"] = tekken["vocab"][:N_RANKS]
    del tekken["image"]
    DATA.mkdir(exist_ok=True)
    (DATA / "tekken.json").write_text(json.dumps(tekken, separators=(",", ":")) + "\n")
    for source, target in ((DATA / "tekken.json", "expected"), (whole, "expected_whole")):
        tokenizer = Tekkenizer.from_file(source)
        entries = ([text, tokenizer.encode(text, bos=False, eos=False)] for text in TEXTS)
        lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
        (DATA / f"{target}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
