"""Nemotron-H: each layer is a Mamba 2 mixer, attention, a feed-forward block or experts."""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys

from worker.convert.architectures import blocks, experts, state_space
from worker.convert.architectures.rules import Dims, Family, Metadata, Rules
from worker.convert.config import Config
from worker.errors import ModelError

_MIXER = "backbone.layers.{i}.mixer"
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}


def _pattern(config: Config) -> tuple[str, ...]:
    """The kind of each layer: older configurations have letters, newer ones words."""
    letters = config.values.get("hybrid_override_pattern")
    if isinstance(letters, str):
        kinds = [_LETTERS.get(letter, letter) for letter in letters]
    else:
        kinds = [_KINDS.get(str(kind), str(kind)) for kind in config.items("layers_block_type")]
    unknown = set(kinds) - set(_LETTERS.values())
    if unknown:
        raise ModelError(f"{config.name}: layers of kind {min(unknown)!r} cannot be converted")
    return tuple(kinds)


def _dims(config: Config) -> Dims:
    kinds = _pattern(config)
    d = Dims.of(Config({**config.values, "num_hidden_layers": len(kinds)}, config.name))
    d = state_space.with_sizes(d, config, config.integer("mamba_num_heads"))
    if "moe" in kinds:
        d = replace(
            d,
            n_expert=config.integer("n_routed_experts"),
            n_ff_expert=config.integer("moe_intermediate_size"),
            n_ff_shared=config.integer("moe_shared_expert_intermediate_size"),
        )
    return replace(d, kinds=kinds)


def _metadata(_arch: str, config: Config, d: Dims) -> Metadata:
    epsilon = config.number("layer_norm_epsilon", "norm_eps", default=1e-5)
    n_ff = d.n_ff_expert or d.n_ff
    found: Metadata = {
        **blocks.sizes(d, config.integer("max_position_embeddings")),
        Keys.LLM.FEED_FORWARD_LENGTH: [n_ff if k in ("mlp", "moe") else 0 for k in d.kinds],
        Keys.Attention.HEAD_COUNT_KV: [
            d.n_head_kv if kind == "attention" else 0 for kind in d.kinds
        ],
        Keys.Attention.KEY_LENGTH: d.head_dim,
        Keys.Attention.VALUE_LENGTH: d.head_dim,
        Keys.Attention.LAYERNORM_EPS: epsilon,
        Keys.Attention.LAYERNORM_RMS_EPS: epsilon,
        Keys.LLM.VOCAB_SIZE: d.n_vocab,
        **state_space.metadata(d),
    }
    if d.n_expert:
        found |= experts.expert_metadata(config, d)
        found |= {
            Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: d.n_ff_shared,
            Keys.LLM.EXPERT_SHARED_COUNT: config.integer("n_shared_experts"),
            Keys.LLM.EXPERT_WEIGHTS_NORM: config.flag("norm_topk_prob", default=True),
            Keys.LLM.EXPERT_WEIGHTS_SCALE: config.number("routed_scaling_factor", default=1.0),
        }
    return found


def _check(config: Config, d: Dims) -> None:
    blocks.require(config, mlp_hidden_act="relu2", use_bias=False, attention_bias=False)
    blocks.require(config, mlp_bias=False, mamba_proj_bias=False, use_conv_bias=True)
    blocks.require(config, n_group=1, moe_latent_size=None)


_RULES: Rules = {
    **blocks.embeddings("backbone.embeddings", "backbone.norm_f"),
    "backbone.layers.{i}.norm.weight": blocks.norm("blk.{i}.attn_norm"),
    **experts.only("mamba", state_space.mamba2(_MIXER)),
    **experts.only("attention", blocks.attention(_MIXER, biases=False)),
}


def _has_experts(config: Config) -> bool:
    return "moe" in _pattern(config)


NEMOTRON_H = Family(
    architecture="nemotron_h",
    names=("NemotronHForCausalLM",),
    rules={**_RULES, **experts.only("mlp", blocks.mlp(_MIXER))},
    metadata=_metadata,
    dims=_dims,
    roots=("backbone.", "model."),
    applies=lambda config: not _has_experts(config),
    check=_check,
)


def _without_gate(rules: Rules) -> Rules:
    return {source: rule for source, rule in rules.items() if "gate_proj" not in source}


NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    architecture="nemotron_h_moe",
    rules={
        **_RULES,
        **experts.only(
            "moe",
            experts.router(f"{_MIXER}.gate.weight"),
            experts.score_correction(f"{_MIXER}.gate.e_score_correction_bias"),
            _without_gate(experts.experts(f"{_MIXER}.experts")),
            _without_gate(experts.shared_experts(f"{_MIXER}.shared_experts")),
        ),
    },
    applies=_has_experts,
    ignored=(r"mtp\..*",),
)

FAMILIES = (NEMOTRON_H, NEMOTRON_H_MOE)
