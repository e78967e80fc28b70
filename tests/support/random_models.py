"""Small random models of each kind of memory that llama.cpp keeps, with the bundled vocabulary.

`dense` keeps every token's cells, `windowed` only those of the last tokens in three of four layers,
`hybrid` a recurrent state beside the cells, `recurrent` only the state; `experts` has windows in
every other layer and attention sinks, like gpt-oss; `convolved` has short convolutions there, like
LFM2, from which tokens can be removed. `predicting` is a dense one with a layer for multi-token
prediction, like GLM 4.5, that is often right, because the next token depends little on earlier
ones. They differ in what the engine may do with a sequence: cut it anywhere, or only continue it.

All experts are used. A router that chooses some of them is discontinuous: if two experts are
equally likely, the last bits of a sum decide between them, and the logits jump.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize

from tests.support.bundled import bundled_gguf
from tests.support.gguf_file import finish
from tests.support.made import made_once

Kind = Literal["dense", "windowed", "hybrid", "recurrent", "experts", "convolved", "predicting"]
KINDS: tuple[Kind, ...] = ("dense", "windowed", "hybrid", "recurrent", "experts")
ARCHITECTURES = {
    "dense": "llama",
    "windowed": "olmo2",
    "hybrid": "falcon-h1",
    "recurrent": "mamba2",
    "experts": "gpt-oss",
    "convolved": "lfm2",
    "predicting": "glm4moe",
}
WINDOW = 24
CONTEXT_LENGTH = 8192
N_LAYERS, STATE, CONV = 4, 16, 4
N_DEEPSTACK = 2
"""Number of first layers to which qwen3vl adds the features of a projector's layers."""
N_EXPERTS = 4
Q4_0_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Size:
    """Channels and heads, `width` times as many as in the smallest; `head` is the number of
    channels of an attention head."""

    width: int = 1
    head: int = 16

    @property
    def n_embd(self) -> int:
        return 64 * self.width

    @property
    def n_ff(self) -> int:
        return 128 * self.width

    @property
    def n_heads(self) -> int:
        return self.n_embd // self.head

    @property
    def n_kv_heads(self) -> int:
        return self.n_heads // 2

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head

    @property
    def inner(self) -> int:
        return 128 * self.width

    @property
    def ssm_heads(self) -> int:
        return 8 * self.width


Tensor = tuple[str, npt.NDArray[np.float32]]


@made_once("{kind}.gguf")
def random_model(
    path: Path,
    kind: Kind,
    width: int = 1,
    template: str | None = None,
    head: int = 16,
    renamed: tuple[str, ...] = (),
    architecture: str | None = None,
    packed: bool = False,
) -> None:
    """Return a model of that kind, always the same. `width` multiplies its channels and heads,
    `head` makes fewer and larger heads. The last tokens of the vocabulary are `renamed`. A `packed`
    one has quantised matrices, one of which is both embedding and output. With `architecture` it
    has the same tensors, and the additional ones of qwen3vl."""
    writer = GGUFWriter(str(path), architecture or ARCHITECTURES[kind])
    size = Size(width, head)
    n_vocab = _copy_vocabulary(writer, template, renamed)
    _write_metadata(writer, kind, size)
    for name, tensor in _tensors(kind, n_vocab, size, np.random.default_rng(0)):
        if packed and name == "output.weight":
            continue
        if packed and tensor.ndim == 2 and tensor.shape[1] % Q4_0_BLOCK == 0:
            writer.add_tensor(name, quantize(tensor, Type.Q4_0), raw_dtype=Type.Q4_0)
        else:
            writer.add_tensor(name, tensor)
    if architecture == "qwen3vl":
        writer.add_rope_dimension_sections([head // 4, head // 8, head // 8, 0])
        writer.add_num_deepstack_layers(N_DEEPSTACK)
        for layer, side in itertools.product(range(N_LAYERS), "qk"):
            norm = np.ones(head, dtype=np.float32)
            writer.add_tensor(f"blk.{layer}.attn_{side}_norm.weight", norm)
    finish(writer)


def _copy_vocabulary(writer: GGUFWriter, template: str | None, renamed: tuple[str, ...]) -> int:
    """Copy the bundled model's tokenizer, and its chat template or the given one; returns the
    number of tokens."""
    fields = GGUFReader(str(bundled_gguf("f32"))).fields
    for name, field in fields.items():
        if not name.startswith("tokenizer."):
            continue
        kind, *items = field.types
        sub_type = items[0] if kind == GGUFValueType.ARRAY else None
        value = field.contents()
        if name == "tokenizer.ggml.tokens" and renamed:
            value = [*value[: -len(renamed)], *renamed]
        if template is None or name != "tokenizer.chat_template":
            writer.add_key_value(name, value, kind, sub_type)
    if template is not None:
        writer.add_chat_template(template)
    return len(fields["tokenizer.ggml.tokens"].data)


def _write_metadata(writer: GGUFWriter, kind: Kind, size: Size) -> None:
    writer.add_name(f"random-{kind}")
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(size.n_embd)
    writer.add_block_count(N_LAYERS + (kind == "predicting"))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(0)
    if kind != "recurrent":
        writer.add_feed_forward_length(size.n_ff)
        writer.add_head_count(size.n_heads)
        of_layers = [size.n_kv_heads * (layer % 2) for layer in range(N_LAYERS)]
        writer.add_head_count_kv(of_layers if kind == "convolved" else size.n_kv_heads)
        writer.add_rope_dimension_count(size.head)
    else:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
    if kind == "predicting":
        writer.add_nextn_predict_layers(1)
        writer.add_leading_dense_block_count(N_LAYERS)
        writer.add_expert_shared_count(1)
    if kind == "convolved":
        writer.add_shortconv_l_cache(CONV)
    if kind in ("windowed", "experts"):
        writer.add_sliding_window(WINDOW)
    if kind in ("predicting", "experts"):
        writer.add_key_length(size.head)
        writer.add_value_length(size.head)
        writer.add_expert_count(N_EXPERTS)
        writer.add_expert_used_count(N_EXPERTS)
        writer.add_expert_feed_forward_length(size.n_ff)
    if kind in ("hybrid", "recurrent"):
        writer.add_ssm_conv_kernel(CONV)
        writer.add_ssm_inner_size(size.inner)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_time_step_rank(size.ssm_heads)
        writer.add_ssm_group_count(1)


def _normal(random: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    """Weights that preserve the norm of their input."""
    return random.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)


def _tensors(kind: Kind, n_vocab: int, size: Size, random: np.random.Generator) -> Iterator[Tensor]:
    weights = partial(_normal, random)

    def norm(n: int) -> npt.NDArray[np.float32]:
        return np.ones(n, dtype=np.float32)

    embedding = weights(n_vocab, size.n_embd)
    if kind == "predicting":
        embedding *= np.float32(size.n_embd**0.5)
    yield "token_embd.weight", embedding
    yield f"{'token_embd' if kind == 'convolved' else 'output'}_norm.weight", norm(size.n_embd)
    yield "output.weight", 4 * weights(n_vocab, size.n_embd)
    for layer in range(N_LAYERS + (kind == "predicting")):
        block: dict[str, npt.NDArray[np.float32]] = {}
        if kind in ("hybrid", "recurrent"):
            block |= _state_space(size, random)
            block["attn_norm.weight"] = norm(size.n_embd)
        has_attention = kind != "recurrent" and not (kind == "convolved" and layer % 2 == 0)
        if kind == "convolved" and has_attention:
            block |= {f"attn_{side}_norm.weight": norm(size.head) for side in "qk"}
        elif kind == "convolved":
            block["shortconv.conv.weight"] = weights(size.n_embd, CONV)
            block["shortconv.in_proj.weight"] = weights(3 * size.n_embd, size.n_embd)
            block["shortconv.out_proj.weight"] = weights(size.n_embd, size.n_embd)
        if has_attention:
            block["attn_q.weight"] = weights(size.n_embd, size.n_embd)
            block["attn_k.weight"] = weights(size.kv_width, size.n_embd)
            block["attn_v.weight"] = weights(size.kv_width, size.n_embd)
            block["attn_output.weight"] = weights(size.n_embd, size.n_embd)
        if layer == N_LAYERS:
            block |= _next_token(size, random)
        elif kind == "experts":
            block |= _experts(size, random)
        elif kind != "recurrent":
            block["ffn_gate.weight"] = weights(size.n_ff, size.n_embd)
            block["ffn_up.weight"] = weights(size.n_ff, size.n_embd)
            block["ffn_down.weight"] = weights(size.n_embd, size.n_ff)
        if kind == "predicting":
            for name in block.keys() & {"attn_output.weight", "ffn_down.weight"}:
                block[name] *= np.float32(0.1)
            block["post_attention_norm.weight"] = norm(size.n_embd)
        if kind in ("dense", "convolved", "predicting"):
            block["attn_norm.weight"] = norm(size.n_embd)
        if kind in ("dense", "hybrid", "convolved"):
            block["ffn_norm.weight"] = norm(size.n_embd)
        if kind == "windowed":
            block["attn_q_norm.weight"] = norm(size.n_embd)
            block["attn_k_norm.weight"] = norm(size.kv_width)
            block["post_attention_norm.weight"] = norm(size.n_embd)
            block["post_ffw_norm.weight"] = norm(size.n_embd)
        for name, tensor in block.items():
            plain = name.removesuffix(".weight") if name == "ffn_norm.weight" else name
            yield f"blk.{layer}.{plain if kind == 'hybrid' else name}", tensor


def _experts(size: Size, random: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """gpt-oss's block except the attention's matrices: everything has a bias."""
    normal = partial(_normal, random)
    return {
        "attn_norm.weight": np.ones(size.n_embd, dtype=np.float32),
        "post_attention_norm.weight": np.ones(size.n_embd, dtype=np.float32),
        "attn_q.bias": normal(size.n_embd),
        "attn_k.bias": normal(size.kv_width),
        "attn_v.bias": normal(size.kv_width),
        "attn_output.bias": normal(size.n_embd),
        "attn_sinks.weight": normal(size.n_heads),
        "ffn_gate_inp.weight": normal(N_EXPERTS, size.n_embd),
        "ffn_gate_inp.bias": normal(N_EXPERTS),
        "ffn_gate_exps.weight": normal(N_EXPERTS, size.n_ff, size.n_embd),
        "ffn_gate_exps.bias": normal(N_EXPERTS, size.n_ff),
        "ffn_up_exps.weight": normal(N_EXPERTS, size.n_ff, size.n_embd),
        "ffn_up_exps.bias": normal(N_EXPERTS, size.n_ff),
        "ffn_down_exps.weight": normal(N_EXPERTS, size.n_embd, size.n_ff),
        "ffn_down_exps.bias": normal(N_EXPERTS, size.n_embd),
    }


def _next_token(size: Size, random: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """GLM 4.5's layer for multi-token prediction, except its attention: experts, and a mixture of
    the token with the preceding hidden state, which here is mostly the token."""
    normal = partial(_normal, random)
    token = np.eye(size.n_embd, dtype=np.float32)
    one = np.ones(size.n_embd, dtype=np.float32)
    experts = {
        f"ffn_{name}_exps.weight": 0.2 * normal(N_EXPERTS, *shape)
        for name, shape in (
            ("gate", (size.n_ff, size.n_embd)),
            ("up", (size.n_ff, size.n_embd)),
            ("down", (size.n_embd, size.n_ff)),
        )
    }
    return experts | {
        **{name.replace("exps", "shexp"): tensor[0] for name, tensor in experts.items()},
        "ffn_gate_inp.weight": normal(N_EXPERTS, size.n_embd),
        "exp_probs_b.bias": np.zeros(N_EXPERTS, dtype=np.float32),
        "nextn.eh_proj.weight": np.hstack([token, 0.2 * normal(size.n_embd, size.n_embd)]),
        "nextn.enorm.weight": one,
        "nextn.hnorm.weight": one,
        "nextn.shared_head_norm.weight": one,
    }


def _state_space(size: Size, random: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """A Mamba 2 mixer whose state decays slowly, so that early tokens still matter."""
    width, normal = size.inner + 2 * STATE, partial(_normal, random)

    def uniform(low: float, high: float, *shape: int) -> npt.NDArray[np.float32]:
        return random.uniform(low, high, shape).astype(np.float32)

    return {
        "ssm_in.weight": normal(size.inner + width + size.ssm_heads, size.n_embd),
        "ssm_conv1d.weight": uniform(-0.5, 0.5, width, CONV),
        "ssm_conv1d.bias": uniform(-0.1, 0.1, width),
        "ssm_dt.bias": uniform(-4.0, -2.0, size.ssm_heads),
        "ssm_a": -uniform(0.05, 0.5, size.ssm_heads, 1),
        "ssm_d": uniform(0.5, 1.0, size.ssm_heads, 1),
        "ssm_norm.weight": np.ones((1, size.inner), dtype=np.float32),
        "ssm_out.weight": normal(size.n_embd, size.inner),
    }
