"""Makes `tests/data/loglikelihoods.json`: transformers' log-likelihoods of 50 continuations.

    python -m tools.reference.make_loglikelihoods        (or `make parity-data`)

Needs PyTorch and transformers, which nothing else here does; the data is committed. The model is
the bundled one, its weights and all sums in single precision.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch  # type: ignore[import-not-found]
import transformers  # type: ignore[import-not-found]

MODEL = Path(__file__).parents[2] / "worker/assets/tiny-model"
TARGET = Path(__file__).parents[2] / "tests/data/loglikelihoods.json"
BEGINNINGS = (
    "Once upon a time there was a small",
    "What is the capital of France?",
    "The rabbit ran into the forest and",
    "Der Hase läuft",
    "def add(a, b):\n    return",
    "她说：“",
    "One, two, three,",
    "The weather in Paris is",
    "A very long story begins with a very short sentence. " * 3 + "Then it goes on and on",
    '{"name": "Ada", "age":',
)
CONTINUATIONS = (" fox", " Paris", " a + b\n", " 😀 four", " he came home and slept.")


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    items = []
    for context in BEGINNINGS:
        for continuation in CONTINUATIONS:
            before = tokenizer.encode(context, add_special_tokens=False)
            ids = tokenizer.encode(context + continuation, add_special_tokens=False)
            with torch.no_grad():
                scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            behind = range(len(before), len(ids))
            items.append(
                {
                    "context": context,
                    "continuation": continuation,
                    "ids": ids,
                    "n_context": len(before),
                    "loglikelihood": sum(float(scores[at - 1, ids[at]]) for at in behind),
                    "is_greedy": all(int(scores[at - 1].argmax()) == ids[at] for at in behind),
                }
            )
    lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in items)
    TARGET.write_text(f"[\n{lines}\n]\n", "utf-8")
    print(f"{len(items)} items, {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
