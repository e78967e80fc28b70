"""Makes RWKV 7's reference data: a small random checkpoint with its logits, and a vocabulary.

    python -m tools.reference.make_rwkv_data

Needs PyTorch and `rwkv`, the authors' own package: transformers has no RWKV 7. The checkpoint,
`tests/data/parity/rwkv-7`, has the names of flash-linear-attention, which published ones have, and
goes to the package under its own. `tests/data/rwkv` holds the tokens of the World vocabulary that
the texts of `corpus` have, and the ids that the package gives those texts.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch  # type: ignore[import-not-found]
from safetensors.torch import save_file

from tools.reference.parity_settings import N_VOCAB
from worker.convert.tokenizer.corpus import TEXTS
from worker.convert.tokenizer.rwkv import FILE

os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}

DATA = Path(__file__).parents[2] / "tests/data"
SEED, N_TOKENS = 77, 24
LAYERS, WIDTH, HEAD, INNER = 2, 128, 64, 192
RANKS = {"w": 16, "a": 16, "v": 8, "g": 24}
CONFIG = {
    "architectures": ["RWKV7ForCausalLM"],
    "model_type": "rwkv7",
    "hidden_size": WIDTH,
    "head_dim": HEAD,
    "num_hidden_layers": LAYERS,
    "intermediate_size": INNER,
    "decay_low_rank_dim": RANKS["w"],
    "a_low_rank_dim": RANKS["a"],
    "v_low_rank_dim": RANKS["v"],
    "gate_low_rank_dim": RANKS["g"],
    "hidden_act": "sqrelu",
    "norm_bias": True,
    "norm_eps": 1e-5,
    "norm_first": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "value_dim": [WIDTH] * LAYERS,
    "vocab_size": N_VOCAB,
}


def main() -> None:
    torch.set_num_threads(1)
    make_model(DATA / "parity/rwkv-7")
    make_vocabulary(DATA / "rwkv")


def make_model(folder: Path) -> None:
    generator = torch.Generator().manual_seed(SEED)

    def drawn(*shape: int, around: float = 0.0, gain: float = 0.0) -> torch.Tensor:
        spread = gain / shape[-1] ** 0.5 if gain else 0.3
        return (around + spread * torch.randn(shape, generator=generator)).bfloat16()

    tensors = {"model.embeddings.weight": drawn(N_VOCAB, WIDTH, gain=WIDTH**0.5)}
    tensors["lm_head.weight"] = drawn(N_VOCAB, WIDTH, gain=1.2)
    norms = ["model.layers.0.pre_norm", "model.norm"]
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        norms += [f"{layer}.attn_norm", f"{layer}.ffn_norm", f"{layer}.attn.g_norm"]
        for x in "rwkvag":
            tensors[f"{layer}.attn.x_{x}"] = drawn(1, 1, WIDTH, around=0.5)
        tensors[f"{layer}.ffn.x_k"] = drawn(WIDTH, around=0.5)
        tensors[f"{layer}.attn.k_k"] = drawn(WIDTH, around=0.8)
        tensors[f"{layer}.attn.k_a"] = drawn(WIDTH, around=1.0)
        tensors[f"{layer}.attn.r_k"] = drawn(WIDTH // HEAD, HEAD)
        for x in "rkvo":
            tensors[f"{layer}.attn.{x}_proj.weight"] = drawn(WIDTH, WIDTH, gain=1.0)
        for x, rank in RANKS.items():
            if x == "v" and i == 0:
                continue
            lora = f"{layer}.attn.{x}_lora.lora"
            tensors[f"{lora}.0.weight"] = drawn(rank, WIDTH, gain=1.0)
            tensors[f"{lora}.2.weight"] = drawn(WIDTH, rank, gain=1.0)
            if x != "g":
                tensors[f"{lora}.2.bias"] = drawn(WIDTH)
        tensors[f"{layer}.ffn.key.weight"] = drawn(INNER, WIDTH, gain=1.0)
        tensors[f"{layer}.ffn.value.weight"] = drawn(WIDTH, INNER, gain=1.0)
    for norm in norms:
        tensors[f"{norm}.weight"] = drawn(WIDTH, around=1.0)
        tensors[f"{norm}.bias"] = drawn(WIDTH)
    tokens = torch.randint(3, N_VOCAB, (N_TOKENS,), generator=generator).tolist()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    expected = logits(tensors, tokens)
    np.savez(folder / "expected.npz", tokens=np.array(tokens, dtype=np.int32), logits=expected)


def logits(tensors: dict[str, torch.Tensor], tokens: list[int]) -> np.ndarray:
    from rwkv.model import RWKV  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        theirs = dict(their_own(name, value.float()) for name, value in tensors.items())
        torch.save(theirs, f"{path}.pth")
        model = RWKV(model=str(path), strategy="cpu fp32")
        found, _state = model.forward(tokens, None, full_output=True)
    return np.asarray(found.float().numpy())


def their_own(name: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A tensor as the package's own checkpoints have it: products are written the other way."""
    if ".lora." in name and value.dim() == 2:
        value = value.t().contiguous()
    names = {"model.embeddings": "emb", "model.norm": "ln_out", "lm_head": "head"}
    names |= {"model.layers": "blocks", "pre_norm": "ln0", "attn_norm": "ln1", "ffn_norm": "ln2"}
    names |= {"g_norm": "ln_x", ".attn.": ".att.", "o_proj": "output", "r_proj": "receptance"}
    names |= {"k_proj": "key", "v_proj": "value"}
    names |= {f"{x}_lora.lora.0.weight": f"{x}1" for x in RANKS}
    names |= {f"{x}_lora.lora.2.weight": f"{x}2" for x in RANKS}
    names |= {f"{x}_lora.lora.2.bias": f"{x}0" for x in RANKS}
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name, value


def make_vocabulary(folder: Path) -> None:
    import rwkv  # type: ignore[import-not-found]
    from rwkv.rwkv_tokenizer import TRIE_TOKENIZER  # type: ignore[import-not-found]

    whole = Path(rwkv.__file__).parent / FILE
    everything = "\n".join(TEXTS).encode()
    folder.mkdir(exist_ok=True)
    with whole.open(encoding="utf-8", newline="\n") as lines, (folder / FILE).open("w") as kept:
        tokens = TRIE_TOKENIZER(str(whole)).idx2token
        for line in lines:
            token = tokens[int(line.split(" ", 1)[0])]
            if len(token) == 1 or token in everything:
                kept.write(line)
    tokenizer = TRIE_TOKENIZER(str(folder / FILE))
    expected = [[text, tokenizer.encode(text)] for text in TEXTS]
    written = (json.dumps(entry, ensure_ascii=False) for entry in expected)
    (folder / "expected.json").write_text("[\n" + ",\n".join(written) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
