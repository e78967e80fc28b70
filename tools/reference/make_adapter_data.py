"""Makes `tests/data/adapter`: a random PEFT adapter of the bundled model, and its logits.

`python -m tools.reference.make_adapter_data` in an environment with PyTorch, transformers and peft
(`make parity-data`); the tests need none of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from peft import LoraConfig, PeftModel, get_peft_model  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "worker/assets/tiny-model"
FOLDER = ROOT / "tests/data/adapter"
TOKENS = [0, 17, 300, 42, 999, 5, 128, 64, 700, 11]


def base() -> Any:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return model.eval()


def logits(model: Any) -> list[float]:
    with torch.no_grad():
        found = model(torch.tensor([TOKENS])).logits[0, -1]
    return [round(value, 6) for value in found.tolist()]


def main() -> None:
    torch.manual_seed(16)
    config = LoraConfig(
        r=2,
        lora_alpha=8,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"],
        rank_pattern={"down_proj": 4},
        alpha_pattern={"q_proj": 4},
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(base(), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.08
    adapted.half().save_pretrained(FOLDER)
    (FOLDER / "README.md").unlink()
    settings = FOLDER / "adapter_config.json"
    settings.write_text(settings.read_text().replace(str(MODEL), MODEL.name) + "\n")
    served = PeftModel.from_pretrained(base(), FOLDER).eval()
    expected = {"tokens": TOKENS, "base": logits(base()), "adapted": logits(served)}
    (FOLDER / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
