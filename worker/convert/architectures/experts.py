"""Parts that families with experts share: router, experts, shared experts, their metadata."""

from __future__ import annotations

from dataclasses import replace

from gguf.constants import Keys

from worker.convert.architectures import blocks
from worker.convert.architectures.rules import Dims, Metadata, Rule, Rules, Shape
from worker.convert.config import Config


def only(kind: str, *rules: Rules) -> Rules:
    """Limit the rules to layers of one kind."""

    def limited(rule: Rule) -> Rule:
        return replace(rule, on=kind)

    return {
        source: tuple(map(limited, rule)) if isinstance(rule, tuple) else limited(rule)
        for table in rules
        for source, rule in table.items()
    }


def leading_dense(n_layers: int, n_dense: int) -> tuple[str, ...]:
    """The kinds of the layers: the first `n_dense` have no experts."""
    return ("dense",) * n_dense + ("experts",) * (n_layers - n_dense)


def router(source: str) -> Rules:
    return {
        source: Rule("blk.{i}.ffn_gate_inp.weight", lambda d: (d.n_expert, d.n_embd), keep_f32=True)
    }


def up(d: Dims) -> tuple[int, ...]:
    return (d.n_expert, d.n_ff_expert, d.n_embd)


def down(d: Dims) -> tuple[int, ...]:
    return (d.n_expert, d.n_embd, d.n_ff_expert)


def experts(prefix: str, names: tuple[str, str, str] = blocks.GATED) -> Rules:
    """Experts stored as one tensor each, stacked into one tensor per layer."""
    targets = (("ffn_gate_exps", up), ("ffn_up_exps", up), ("ffn_down_exps", down))
    return blocks.weights(f"{prefix}.{{e}}", dict(zip(names, targets, strict=True)))


def fused_experts(prefix: str) -> Rules:
    """All experts of a layer in one tensor; gate and up are halves of each expert."""
    return {
        f"{prefix}.gate_up_proj": (
            Rule("blk.{i}.ffn_gate_exps.weight", up, rows=lambda d: (0, d.n_ff_expert)),
            Rule("blk.{i}.ffn_up_exps.weight", up, rows=lambda d: (d.n_ff_expert, d.n_ff_expert)),
        ),
        f"{prefix}.down_proj": Rule("blk.{i}.ffn_down_exps.weight", down),
    }


def shared_experts(prefix: str) -> Rules:
    """The shared experts, which process every token, as one feed-forward block."""
    parts: dict[str, tuple[str, Shape]] = {
        "gate_proj": ("ffn_gate_shexp", lambda d: (d.n_ff_shared, d.n_embd)),
        "up_proj": ("ffn_up_shexp", lambda d: (d.n_ff_shared, d.n_embd)),
        "down_proj": ("ffn_down_shexp", lambda d: (d.n_embd, d.n_ff_shared)),
    }
    return blocks.weights(prefix, parts)


def score_correction(source: str) -> Rules:
    """The bias that is added to the experts' scores for their selection."""
    return {source: Rule("blk.{i}.exp_probs_b.bias", lambda d: (d.n_expert,))}


def expert_metadata(config: Config, d: Dims) -> Metadata:
    return {
        Keys.LLM.EXPERT_COUNT: d.n_expert,
        Keys.LLM.EXPERT_USED_COUNT: config.integer("num_experts_per_tok"),
        Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: d.n_ff_expert,
    }


def metadata(arch: str, config: Config, d: Dims) -> Metadata:
    """The keys of a family with rotary positions and RMS norms, some of whose models have
    experts."""
    found = blocks.rms_metadata(arch, config, d)
    if d.n_expert:
        found |= expert_metadata(config, d)
    if d.n_ff_shared:
        found[Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH] = d.n_ff_shared
    return found


def shared_metadata(config: Config, d: Dims, gating: int) -> Metadata:
    """The keys for experts as DeepSeek has them; `gating` is 1 for softmax and 2 for sigmoid."""
    return {
        **expert_metadata(config, d),
        Keys.LLM.EXPERT_SHARED_COUNT: config.integer("n_shared_experts"),
        Keys.LLM.LEADING_DENSE_BLOCK_COUNT: d.kinds.count("dense"),
        Keys.LLM.EXPERT_GATING_FUNC: gating,
        Keys.LLM.EXPERT_WEIGHTS_SCALE: config.number("routed_scaling_factor", default=1.0),
        Keys.LLM.EXPERT_WEIGHTS_NORM: config.flag("norm_topk_prob"),
    }


def dims(config: Config, n_expert: str) -> Dims:
    """The sizes of a family whose experts are as wide as `intermediate_size` says; their number is
    the setting `n_expert`."""
    d = Dims.of(config)
    return replace(d, n_expert=config.integer(n_expert), n_ff_expert=d.n_ff)


def deepseek_dims(config: Config) -> Dims:
    d = Dims.of(config)
    n_dense = int(config.values.get("first_k_dense_replace") or 0)
    n_ff = config.integer("moe_intermediate_size")
    return replace(
        d,
        n_expert=config.integer("n_routed_experts"),
        n_ff_expert=n_ff,
        n_ff_shared=n_ff * config.integer("n_shared_experts"),
        kinds=leading_dense(d.n_layers, n_dense),
    )
