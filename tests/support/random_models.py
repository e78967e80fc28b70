"""Small random models of each kind of memory that llama.cpp keeps, with the bundled vocabulary.

`dense` keeps every token's cells, `windowed` those of its last tokens in three of four layers,
`hybrid` a recurrent state beside the cells, `recurrent` the state alone; `experts` has windows in
every other layer and attention sinks, as gpt-oss. They differ in what the engine may do with a
sequence: cut it anywhere, or only go on with it.

All experts are used. A router that chooses some of them has steps: where two experts are equally
likely the last bits of a sum decide which one speaks, and the logits jump.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from tests.support.bundled import bundled_gguf

Kind = Literal["dense", "windowed", "hybrid", "recurrent", "experts"]
KINDS: tuple[Kind, ...] = ("dense", "windowed", "hybrid", "recurrent", "experts")
ARCHITECTURES = {
    "dense": "llama",
    "windowed": "olmo2",
    "hybrid": "falcon-h1",
    "recurrent": "mamba2",
    "experts": "gpt-oss",
}
WINDOW = 24
N_LAYERS, N_EMBD, N_FF = 4, 64, 128
N_HEADS, N_KV_HEADS, HEAD = 4, 2, 16
INNER, STATE, SSM_HEADS, CONV = 128, 16, 8, 4
N_EXPERTS = 4

Tensor = tuple[str, npt.NDArray[np.float32]]


@functools.cache
def random_model(kind: Kind, seed: int = 0, n_used_experts: int = N_EXPERTS) -> Path:
    """A model of that kind; the same for the same seed. Removed at the end of the process."""
    folder = Path(tempfile.mkdtemp(prefix="llorch-random-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / f"{kind}.gguf"
    writer = GGUFWriter(str(path), ARCHITECTURES[kind])
    n_vocab = _copy_vocabulary(writer)
    _write_metadata(writer, kind, n_used_experts)
    for name, tensor in _tensors(kind, n_vocab, np.random.default_rng(seed)):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _copy_vocabulary(writer: GGUFWriter) -> int:
    """The bundled model's tokenizer and chat template; returns the number of its tokens."""
    fields = GGUFReader(str(bundled_gguf("f32"))).fields
    for name, field in fields.items():
        if not name.startswith("tokenizer."):
            continue
        kind, *items = field.types
        sub_type = items[0] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type)
    return len(fields["tokenizer.ggml.tokens"].data)


def _write_metadata(writer: GGUFWriter, kind: Kind, n_used_experts: int) -> None:
    writer.add_name(f"random-{kind}")
    writer.add_context_length(2048)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYERS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(0)
    if kind != "recurrent":
        writer.add_feed_forward_length(N_FF)
        writer.add_head_count(N_HEADS)
        writer.add_head_count_kv(N_KV_HEADS)
        writer.add_rope_dimension_count(HEAD)
    else:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
    if kind in ("windowed", "experts"):
        writer.add_sliding_window(WINDOW)
    if kind == "experts":
        writer.add_key_length(HEAD)
        writer.add_value_length(HEAD)
        writer.add_expert_count(N_EXPERTS)
        writer.add_expert_used_count(n_used_experts)
        writer.add_expert_feed_forward_length(N_FF)
    if kind in ("hybrid", "recurrent"):
        writer.add_ssm_conv_kernel(CONV)
        writer.add_ssm_inner_size(INNER)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_time_step_rank(SSM_HEADS)
        writer.add_ssm_group_count(1)


def _tensors(kind: Kind, n_vocab: int, random: np.random.Generator) -> Iterator[Tensor]:
    def weights(rows: int, columns: int) -> npt.NDArray[np.float32]:
        scale = np.float32(columns**-0.5)
        return random.standard_normal((rows, columns), dtype=np.float32) * scale

    def norm(size: int) -> npt.NDArray[np.float32]:
        return np.ones(size, dtype=np.float32)

    yield "token_embd.weight", weights(n_vocab, N_EMBD)
    yield "output_norm.weight", norm(N_EMBD)
    yield "output.weight", 4 * weights(n_vocab, N_EMBD)
    kv_width = N_KV_HEADS * HEAD
    for layer in range(N_LAYERS):
        block: dict[str, npt.NDArray[np.float32]] = {}
        if kind in ("hybrid", "recurrent"):
            block |= _state_space(random)
            block["attn_norm.weight"] = norm(N_EMBD)
        if kind != "recurrent":
            block["attn_q.weight"] = weights(N_EMBD, N_EMBD)
            block["attn_k.weight"] = weights(kv_width, N_EMBD)
            block["attn_v.weight"] = weights(kv_width, N_EMBD)
            block["attn_output.weight"] = weights(N_EMBD, N_EMBD)
        if kind == "experts":
            block |= _experts(random)
        elif kind != "recurrent":
            block["ffn_gate.weight"] = weights(N_FF, N_EMBD)
            block["ffn_up.weight"] = weights(N_FF, N_EMBD)
            block["ffn_down.weight"] = weights(N_EMBD, N_FF)
        if kind == "dense":
            block["attn_norm.weight"] = norm(N_EMBD)
        if kind in ("dense", "hybrid"):
            block["ffn_norm.weight"] = norm(N_EMBD)
        if kind == "windowed":
            block["attn_q_norm.weight"] = norm(N_EMBD)
            block["attn_k_norm.weight"] = norm(kv_width)
            block["post_attention_norm.weight"] = norm(N_EMBD)
            block["post_ffw_norm.weight"] = norm(N_EMBD)
        for name, tensor in block.items():
            plain = name.removesuffix(".weight") if name == "ffn_norm.weight" else name
            yield f"blk.{layer}.{plain if kind == 'hybrid' else name}", tensor


def _experts(random: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """gpt-oss's block but for the attention's matrices: everything has a bias."""

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)

    kv_width = N_KV_HEADS * HEAD
    return {
        "attn_norm.weight": np.ones(N_EMBD, dtype=np.float32),
        "post_attention_norm.weight": np.ones(N_EMBD, dtype=np.float32),
        "attn_q.bias": normal(N_EMBD),
        "attn_k.bias": normal(kv_width),
        "attn_v.bias": normal(kv_width),
        "attn_output.bias": normal(N_EMBD),
        "attn_sinks.weight": normal(N_HEADS),
        "ffn_gate_inp.weight": normal(N_EXPERTS, N_EMBD),
        "ffn_gate_inp.bias": normal(N_EXPERTS),
        "ffn_gate_exps.weight": normal(N_EXPERTS, N_FF, N_EMBD),
        "ffn_gate_exps.bias": normal(N_EXPERTS, N_FF),
        "ffn_up_exps.weight": normal(N_EXPERTS, N_FF, N_EMBD),
        "ffn_up_exps.bias": normal(N_EXPERTS, N_FF),
        "ffn_down_exps.weight": normal(N_EXPERTS, N_EMBD, N_FF),
        "ffn_down_exps.bias": normal(N_EXPERTS, N_EMBD),
    }


def _state_space(random: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """A Mamba 2 mixer whose state decays slowly: what was read long ago still counts."""
    width = INNER + 2 * STATE

    def uniform(low: float, high: float, *shape: int) -> npt.NDArray[np.float32]:
        return random.uniform(low, high, shape).astype(np.float32)

    def normal(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(columns**-0.5)

    return {
        "ssm_in.weight": normal(INNER + width + SSM_HEADS, N_EMBD),
        "ssm_conv1d.weight": uniform(-0.5, 0.5, width, CONV),
        "ssm_conv1d.bias": uniform(-0.1, 0.1, width),
        "ssm_dt.bias": uniform(-4.0, -2.0, SSM_HEADS),
        "ssm_a": -uniform(0.05, 0.5, SSM_HEADS, 1),
        "ssm_d": uniform(0.5, 1.0, SSM_HEADS, 1),
        "ssm_norm.weight": np.ones((1, INNER), dtype=np.float32),
        "ssm_out.weight": normal(N_EMBD, INNER),
    }
