"""Published repositories as `prepare` sees them: their own `config.json` and tokenizer definition,
and weights that are all there by name, type and shape, in a sparse file that holds no bytes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.unit.convert.files import write_hollow

Shape = tuple[int, ...]


def write(
    folder: Path, config: dict[str, Any], weights: Iterable[tuple[str, Shape]] | None = None
) -> None:
    """`config.json`, and `model.safetensors` with what transformers' own classes save for it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_hollow(folder / "model.safetensors", tensors(config) if weights is None else weights)


def write_shards(folder: Path, index: bytes, shapes: Mapping[str, Shape]) -> None:
    """The files that a published index lists, each with its own tensors."""
    (folder / "model.safetensors.index.json").write_bytes(index)
    shards: dict[str, list[tuple[str, Shape]]] = defaultdict(list)
    for name, shard in json.loads(index)["weight_map"].items():
        shards[shard].append((name, shapes[name]))
    for shard, weights in shards.items():
        write_hollow(folder / shard, weights)


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of a decoder of the Llama kind: Llama, Qwen2, Qwen3, Qwen3-MoE."""
    n, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, n)
    yield "model.norm.weight", (n,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, n)
    for i in range(config["num_hidden_layers"]):
        for name, shape in layer(config):
            yield f"model.layers.{i}.{name}", shape


def layer(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    n, kind = config["hidden_size"], config["model_type"]
    head = config.get("head_dim") or n // config["num_attention_heads"]
    rows = {"q": config["num_attention_heads"] * head, "o": n}
    rows["k"] = rows["v"] = config["num_key_value_heads"] * head
    yield "input_layernorm.weight", (n,)
    yield "post_attention_layernorm.weight", (n,)
    for letter, extent in rows.items():
        columns = rows["q"] if letter == "o" else n
        yield f"self_attn.{letter}_proj.weight", (extent, columns)
        if kind == "qwen2" and letter != "o":
            yield f"self_attn.{letter}_proj.bias", (extent,)
    if kind.startswith("qwen3"):
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)
    if kind == "qwen3_moe":
        yield "mlp.gate.weight", (config["num_experts"], n)
        for expert in range(config["num_experts"]):
            yield from feed_forward(f"mlp.experts.{expert}", n, config["moe_intermediate_size"])
    else:
        yield from feed_forward("mlp", n, config["intermediate_size"])


def feed_forward(prefix: str, n: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (inner, n)
    yield f"{prefix}.up_proj.weight", (inner, n)
    yield f"{prefix}.down_proj.weight", (n, inner)
