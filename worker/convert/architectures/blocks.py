"""Parts that most families share: embeddings, attention, feed-forward blocks, metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from worker.convert.architectures.rules import Dims, Metadata, Rule, Rules
from worker.convert.config import Config
from worker.errors import ModelError

ATTENTION = "model.layers.{i}.self_attn"
MLP = "model.layers.{i}.mlp"


def vector(d: Dims) -> tuple[int, ...]:
    return (d.n_embd,)


def norm(target: str, *, plus: float = 0.0, bias: bool = False) -> Rule:
    return Rule(f"{target}.{'bias' if bias else 'weight'}", vector, plus=plus)


def embeddings(prefix: str = "model", *, norm_plus: float = 0.0) -> Rules:
    """Token embedding, final norm and the output head, which may be tied to the embedding."""
    return {
        f"{prefix}.embed_tokens.weight": Rule("token_embd.weight", lambda d: (d.n_vocab, d.n_embd)),
        f"{prefix}.norm.weight": norm("output_norm", plus=norm_plus),
        "lm_head.weight": Rule("output.weight", lambda d: (d.n_vocab, d.n_embd), optional=True),
    }


def pre_norms() -> Rules:
    return {
        "model.layers.{i}.input_layernorm.weight": norm("blk.{i}.attn_norm"),
        "model.layers.{i}.post_attention_layernorm.weight": norm("blk.{i}.ffn_norm"),
    }


def attention(*, interleaved: bool = False, biases: bool = True) -> Rules:
    """Separate q, k, v and output projections; biases are optional where they are known."""
    q_heads = (lambda d: d.n_head) if interleaved else None
    kv_heads = (lambda d: d.n_head_kv) if interleaved else None
    rules: dict[str, Rule] = {
        f"{ATTENTION}.q_proj.weight": Rule(
            "blk.{i}.attn_q.weight", lambda d: (d.q_rows, d.n_embd), interleaved_heads=q_heads
        ),
        f"{ATTENTION}.k_proj.weight": Rule(
            "blk.{i}.attn_k.weight", lambda d: (d.kv_rows, d.n_embd), interleaved_heads=kv_heads
        ),
        f"{ATTENTION}.v_proj.weight": Rule(
            "blk.{i}.attn_v.weight", lambda d: (d.kv_rows, d.n_embd)
        ),
        f"{ATTENTION}.o_proj.weight": Rule(
            "blk.{i}.attn_output.weight", lambda d: (d.n_embd, d.q_rows)
        ),
    }
    if biases:
        rules |= {
            f"{ATTENTION}.q_proj.bias": Rule(
                "blk.{i}.attn_q.bias",
                lambda d: (d.q_rows,),
                optional=True,
                interleaved_heads=q_heads,
            ),
            f"{ATTENTION}.k_proj.bias": Rule(
                "blk.{i}.attn_k.bias",
                lambda d: (d.kv_rows,),
                optional=True,
                interleaved_heads=kv_heads,
            ),
            f"{ATTENTION}.v_proj.bias": Rule(
                "blk.{i}.attn_v.bias", lambda d: (d.kv_rows,), optional=True
            ),
            f"{ATTENTION}.o_proj.bias": Rule("blk.{i}.attn_output.bias", vector, optional=True),
        }
    return rules


def gated_mlp(*, biases: bool = False) -> Rules:
    rules: dict[str, Rule] = {
        f"{MLP}.gate_proj.weight": Rule("blk.{i}.ffn_gate.weight", lambda d: (d.n_ff, d.n_embd)),
        f"{MLP}.up_proj.weight": Rule("blk.{i}.ffn_up.weight", lambda d: (d.n_ff, d.n_embd)),
        f"{MLP}.down_proj.weight": Rule("blk.{i}.ffn_down.weight", lambda d: (d.n_embd, d.n_ff)),
    }
    if biases:
        rules |= {
            f"{MLP}.gate_proj.bias": Rule(
                "blk.{i}.ffn_gate.bias", lambda d: (d.n_ff,), optional=True
            ),
            f"{MLP}.up_proj.bias": Rule("blk.{i}.ffn_up.bias", lambda d: (d.n_ff,), optional=True),
            f"{MLP}.down_proj.bias": Rule("blk.{i}.ffn_down.bias", vector, optional=True),
        }
    return rules


def router(source: str) -> Rules:
    return {
        source: Rule("blk.{i}.ffn_gate_inp.weight", lambda d: (d.n_expert, d.n_embd), keep_f32=True)
    }


def experts(prefix: str, gate: str, up: str, down: str) -> Rules:
    """One tensor per expert, stacked into one per layer."""
    return {
        f"{prefix}.{{e}}.{gate}.weight": Rule(
            "blk.{i}.ffn_gate_exps.weight", lambda d: (d.n_expert, d.n_ff_expert, d.n_embd)
        ),
        f"{prefix}.{{e}}.{up}.weight": Rule(
            "blk.{i}.ffn_up_exps.weight", lambda d: (d.n_expert, d.n_ff_expert, d.n_embd)
        ),
        f"{prefix}.{{e}}.{down}.weight": Rule(
            "blk.{i}.ffn_down_exps.weight", lambda d: (d.n_expert, d.n_embd, d.n_ff_expert)
        ),
    }


def fused_experts(prefix: str) -> Rules:
    """All experts of a layer in one tensor, with gate and up as halves of each."""
    return {
        f"{prefix}.gate_up_proj": (
            Rule(
                "blk.{i}.ffn_gate_exps.weight",
                lambda d: (d.n_expert, d.n_ff_expert, d.n_embd),
                rows=lambda d: (0, d.n_ff_expert),
            ),
            Rule(
                "blk.{i}.ffn_up_exps.weight",
                lambda d: (d.n_expert, d.n_ff_expert, d.n_embd),
                rows=lambda d: (d.n_ff_expert, d.n_ff_expert),
            ),
        ),
        f"{prefix}.down_proj": Rule(
            "blk.{i}.ffn_down_exps.weight", lambda d: (d.n_expert, d.n_embd, d.n_ff_expert)
        ),
    }


def common_metadata(arch: str, config: Config, d: Dims) -> Metadata:
    """The keys that every rotary, RMS-normed family has."""
    return {
        f"{arch}.block_count": d.n_layers,
        f"{arch}.context_length": config.integer("max_position_embeddings"),
        f"{arch}.embedding_length": d.n_embd,
        f"{arch}.feed_forward_length": d.n_ff,
        f"{arch}.attention.head_count": d.n_head,
        f"{arch}.attention.head_count_kv": d.n_head_kv,
        f"{arch}.attention.key_length": d.head_dim,
        f"{arch}.attention.value_length": d.head_dim,
        f"{arch}.vocab_size": d.n_vocab,
        **rope_metadata(arch, config, d.head_dim),
    }


def require(config: Config, key: str, *allowed: object) -> None:
    """Refuse a setting that llama.cpp's implementation does not have; the first is the default."""
    value = config.values.get(key, allowed[0])
    if value not in allowed:
        choice = " or ".join(str(a) for a in allowed)
        raise ModelError(f"{config.name}: {key} is {value!r}, llama.cpp implements {choice}")


def expert_metadata(arch: str, config: Config, d: Dims) -> Metadata:
    return {
        f"{arch}.expert_count": d.n_expert,
        f"{arch}.expert_used_count": config.integer("num_experts_per_tok"),
        f"{arch}.expert_feed_forward_length": d.n_ff_expert,
    }


def rms_norm(arch: str, config: Config) -> Metadata:
    epsilon = config.number("rms_norm_eps")
    return {f"{arch}.attention.layer_norm_rms_epsilon": epsilon}


def rope_metadata(
    arch: str, config: Config, n_dims: int, layers: str | None = None, theta: float = 10000.0
) -> Metadata:
    rope = config.rope(layers, theta)
    found: Metadata = {f"{arch}.rope.dimension_count": n_dims, f"{arch}.rope.freq_base": rope.theta}
    if rope.kind in ("default", "llama3"):
        return found  # Llama 3's scaling is a tensor of factors, see `llama3_factors`.
    if rope.kind == "linear":
        found[f"{arch}.rope.scaling.type"] = "linear"
        found[f"{arch}.rope.scaling.factor"] = rope.params.number("factor")
        return found
    if rope.kind == "yarn":
        found[f"{arch}.rope.scaling.type"] = "yarn"
        found[f"{arch}.rope.scaling.factor"] = rope.params.number("factor")
        found[f"{arch}.rope.scaling.original_context_length"] = rope.params.integer(
            "original_max_position_embeddings",
            default=config.integer("max_position_embeddings"),
        )
        for key, name in (
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
            ("attention_factor", "yarn_attn_factor"),
        ):
            if rope.params.has(key):
                found[f"{arch}.rope.scaling.{name}"] = rope.params.number(key)
        return found
    raise ModelError(
        f"{config.name}: rope scaling of type {rope.kind!r} is not known for {arch}; "
        "default, linear, llama3 and yarn are"
    )


def llama3_factors(config: Config, d: Dims) -> Mapping[str, npt.NDArray[np.float32]]:
    """Llama 3.1's scaling: a divisor for each rotary frequency, as a tensor of its own.

    Frequencies with short waves stay, those with long waves are divided by `factor`, and those in
    between get a blend of both.
    """
    rope = config.rope()
    if rope.kind != "llama3":
        return {}
    factor = rope.params.number("factor")
    low = rope.params.number("low_freq_factor")
    high = rope.params.number("high_freq_factor")
    if high <= low:
        raise ModelError(f"{config.name}: high_freq_factor must be greater than low_freq_factor")
    context = rope.params.integer("original_max_position_embeddings")
    exponents = np.arange(0, d.head_dim, 2, dtype=np.float32) / np.float32(d.head_dim)
    frequencies = np.float32(1) / np.float32(rope.theta) ** exponents
    lengths = np.float32(2 * math.pi) / frequencies
    # How many waves fit into the context that the model was first trained on. In float32
    # throughout, as the models' own code has it.
    waves = np.float32(context) / lengths
    blend = (waves - np.float32(low)) / np.float32(high - low)
    with np.errstate(divide="ignore"):  # Beyond both ends the blend is not used.
        blended = np.float32(1) / ((np.float32(1) - blend) / np.float32(factor) + blend)
    factors = np.where(waves > high, np.float32(1), np.where(waves < low, factor, blended))
    return {"rope_freqs.weight": factors.astype(np.float32)}
