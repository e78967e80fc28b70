"""Decoders with attention and one feed-forward block in each layer, without experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gguf.constants import Keys

from worker.convert.checkpoint import Checkpoint
from worker.convert.config import Config
from worker.convert.family.dims import Dims
from worker.convert.family.metadata import (
    flag,
    if_given,
    mrope_sections,
    norm_epsilon,
    number,
    sections,
    sizes,
)
from worker.convert.family.rules import QKV_BIASES, Family, Metadata, Setting, transposed
from worker.errors import ModelError

_GELU = ("gelu_pytorch_tanh", "gelu_new")

# --- Llama and those that differ from it in a detail -----------------------------------------

LLAMA = Family(
    "llama",
    ("LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "InternLM3ForCausalLM"),
    interleaved=True,
    ignores_window=True,
    scales_as_llama3=True,
)


def is_mistral4(config: Config) -> bool:
    """Whether this is Mistral 4, which shares a multimodal class with its predecessors."""
    kinds = (config.values, config.section("text_config").values)
    return any(values.get("model_type") == "mistral4" for values in kinds)


def in_rope(name: str) -> Setting:
    return lambda config, d: if_given(name)(config.rope().params, d)


MINISTRAL3 = Family(
    "mistral3",
    ("Ministral3ForCausalLM",),
    multimodal=("Mistral3ForConditionalGeneration",),
    interleaved=True,
    metadata={  # Queries are scaled by their position.
        Keys.Rope.SCALING_YARN_BETA_FAST: in_rope("beta_fast"),
        Keys.Rope.SCALING_YARN_BETA_SLOW: in_rope("beta_slow"),
        Keys.Attention.TEMPERATURE_SCALE: in_rope("llama_4_scaling_beta"),
    },
    applies=lambda config: not is_mistral4(config),
    yarn={"truncate": True},
)

GRANITE = Family(
    "granite",
    ("GraniteForCausalLM",),
    interleaved=True,
    metadata={
        Keys.Attention.SCALE: number("attention_multiplier", default=1.0),
        Keys.LLM.EMBEDDING_SCALE: number("embedding_multiplier", default=1.0),
        Keys.LLM.RESIDUAL_SCALE: number("residual_multiplier", default=1.0),
        Keys.LLM.LOGIT_SCALE: number("logits_scaling", default=1.0),
    },
    scales_as_llama3=True,
)

ARCEE = Family(
    "arcee",
    ("ArceeForCausalLM",),
    interleaved=True,
    scales_as_llama3=True,
    requires={"hidden_act": "relu2"},
)

SMOLLM3 = Family(
    "smollm3",
    ("SmolLM3ForCausalLM",),
    interleaved=True,
    requires={
        "hidden_act": "silu",
        "use_sliding_window": False,
        # llama.cpp skips the rotation in every fourth layer and has no setting for it.
        "no_rope_layers": lambda d: ([int((i + 1) % 4 != 0) for i in range(d.n_layers)], []),
    },
)

SEED_OSS = Family(
    "seed_oss",
    ("SeedOssForCausalLM",),
    requires={"hidden_act": "silu", "attention_out_bias": False, "mlp_bias": False},
    needs="-attn_output.bias",
)

ERNIE4_5 = Family(
    "ernie4_5",
    ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    requires={"hidden_act": "silu", "use_bias": False},
)

# --- Qwen --------------------------------------------------------------------------------------


def _check_windows(config: Config, d: Dims) -> None:
    """Without `layer_types`, the first `max_window_layers` layers have no window."""
    has_window = config.number("max_window_layers", default=0) < d.n_layers
    kinds = config.items("layer_types", ["sliding_attention"] * has_window)
    window = config.count("sliding_window") if config.flag("use_sliding_window") else 0
    if "sliding_attention" in kinds and 0 < window < config.integer("max_position_embeddings"):
        raise ModelError(
            f"{config.name}: use_sliding_window is True, but llama.cpp attends to the whole context"
        )


QWEN2 = Family("qwen2", ("Qwen2ForCausalLM",), needs=QKV_BIASES, check=_check_windows)

QWEN3 = replace(QWEN2, architecture="qwen3", names=("Qwen3ForCausalLM",), needs="")

QWEN2_VL = replace(
    QWEN2,
    architecture="qwen2vl",
    names=(),
    multimodal=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    metadata={Keys.Rope.DIMENSION_SECTIONS: sections()},
)


def _unrotated(config: Config) -> Iterator[str]:
    """llama.cpp assigns the frequencies to the dimensions in turn, so it leaves the last ones
    unrotated if the sections differ in length."""
    given = mrope_sections(config) or [0]
    idle = sum(i >= 3 * given[i % 3] for i in range(sum(given)) if i % 3 < len(given))
    if idle:
        yield f"llama.cpp does not rotate the last {idle} of a head's {sum(given)} frequencies"


def deepstack(checkpoint: Checkpoint, _d: Dims) -> Metadata:
    """How many of the first layers each receive features from a layer of the vision model."""
    vision = Config(checkpoint.config).section("vision_config")
    return {Keys.LLM.NUM_DEEPSTACK_LAYERS: len(vision.items("deepstack_visual_indexes", []))}


QWEN3_VL = replace(
    QWEN3,
    architecture="qwen3vl",
    names=(),
    multimodal=("Qwen3VLForConditionalGeneration",),
    metadata={Keys.Rope.DIMENSION_SECTIONS: sections()},
    checkpoint_metadata=deepstack,
    notes=_unrotated,
)

# --- norms after the blocks --------------------------------------------------------------------

OLMO2 = Family("olmo2", ("Olmo2ForCausalLM",), head="always")


def _check_olmo3(config: Config, d: Dims) -> None:
    if config.section("rope_parameters").has("sliding_attention"):
        if config.rope("sliding_attention").theta != config.rope().theta:
            raise ModelError(f"{config.name}: llama.cpp's olmo2 has one rope_theta for all layers")


OLMO3 = replace(OLMO2, names=("Olmo3ForCausalLM",), windows=4, check=_check_olmo3)


def _check_exaone4(config: Config, d: Dims) -> None:
    if config.has("sliding_window") != (d.n_layers == 64):
        raise ModelError(
            f"{config.name}: sliding_window is {config.values.get('sliding_window')}, but "
            "llama.cpp's exaone4 has windows in models of 64 layers and in no others"
        )


EXAONE4 = replace(
    OLMO2,
    architecture="exaone4",
    names=("Exaone4ForCausalLM",),
    windows=4,
    head="optional",
    scales_as_llama3=True,
    check=_check_exaone4,
)

GLM4 = Family(
    "glm4",
    ("Glm4ForCausalLM",),
    sources={"post_attention_layernorm.weight": "ffn_norm"},
    rotary=0.5,
    needs="-attn_output.bias",
)

# --- norms of other kinds ----------------------------------------------------------------------

OLMO = Family(
    "olmo",
    ("OlmoForCausalLM",),
    # Its norms have no weights.
    interleaved=True,
    norm="none",
    metadata={Keys.Attention.LAYERNORM_EPS: 1e-5, Keys.Attention.CLAMP_KQV: if_given("clip_qkv")},
)

COHERE2 = Family(
    "cohere2",
    ("Cohere2ForCausalLM",),
    norm="layer",
    windows=4,
    metadata={
        Keys.LLM.LOGIT_SCALE: number("logit_scale", default=0.0625),
        Keys.Rope.SCALING_TYPE: "none",
    },
    head="never",
    ropes=("default",),
    requires={"hidden_act": "silu", "head_dim": lambda d: d.n_embd // d.n_head},
)

COMMAND_R = replace(
    COHERE2,
    architecture="command-r",
    names=("CohereForCausalLM",),
    windows=0,
    metadata={
        **COHERE2.metadata,
        # The context in training; `max_position_embeddings` is smaller.
        Keys.LLM.CONTEXT_LENGTH: lambda config, d: config.integer(
            "model_max_length", "max_position_embeddings"
        ),
    },
    # llama.cpp reads norms of heads in models of 64 layers and more.
    requires={**COHERE2.requires, "use_qk_norm": lambda d: (d.n_layers >= 64, False)},
)

STABLELM = Family(
    "stablelm",
    ("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    # No ffn_norm if attention and feed-forward run in parallel after one norm.
    # StableLM 2 12B has a separate norm for each head.
    sources={f"self_attn.{x}_layernorm.norms.weight": f"attn_{x}_norm" for x in "qk"},
    norm="layer",
    rotary=0.25,
    metadata={Keys.LLM.USE_PARALLEL_RESIDUAL: flag("use_parallel_residual")},
    head="always",
    needs=lambda config: "ffn_norm ffn_norm.bias" * (not config.flag("use_parallel_residual")),
)

STARCODER2 = Family(
    "starcoder2",
    ("Starcoder2ForCausalLM",),
    norm="layer",
    ignores_window=True,
    requires={"hidden_act": _GELU, "use_bias": True},
)

NEMOTRON = Family(
    "nemotron",
    ("NemotronForCausalLM",),
    norm="layer",
    norm_plus=1.0,
    rotary=0.5,
    head="always",
    requires={"hidden_act": "relu2"},
)

PHI2 = Family(
    "phi2",
    ("PhiForCausalLM",),
    norm="layer",
    rotary=0.5,
    head="always",
    requires={"hidden_act": _GELU, "qk_layernorm": False},
    needs=QKV_BIASES,
)


def _stretched(config: Config, d: Dims) -> float:
    """The base of the rotation. The scaling that these configurations call dynamic stretches it by
    `alpha`, whatever the length of the text."""
    rope = config.rope()
    if rope.kind != "dynamic":
        return rope.theta
    return float(
        rope.theta * rope.params.number("alpha", default=1.0) ** (d.head_dim / (d.head_dim - 2))
    )


HUNYUAN = Family(
    "hunyuan-dense",
    ("HunYuanDenseV1ForCausalLM",),
    metadata={Keys.Rope.FREQ_BASE: _stretched},
    ropes=("default", "linear", "yarn", "dynamic"),
)

JAIS2 = Family("jais2", ("Jais2ForCausalLM",), norm="layer", requires={"hidden_act": "relu2"})

# --- learned positions -------------------------------------------------------------------------


def _gpt2(family: Family, config: Config, d: Dims) -> Metadata:
    n_positions = config.integer("n_positions", "n_ctx")
    return sizes(d, n_positions) | norm_epsilon(family, config)


def _gpt2_config(config: Config) -> Config:
    keys = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
    }
    n_ff = config.integer("n_inner", default=4 * config.integer("n_embd"))
    return config.changed(n_inner=n_ff).renamed(keys)


GPT2 = Family(
    "gpt2",
    ("GPT2LMHeadModel",),
    makes=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), transposed),
    norm="layer",
    common=_gpt2,
    config=_gpt2_config,
    requires={
        "activation_function": _GELU,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
)
