"""The description of a family, and the rules for its tensors that follow from it.

The `gguf` package knows which tensors llama.cpp's implementation of an architecture has, and what
checkpoints call them. A description states only what differs: another name, a part of a tensor, a
function that reorders values. Shapes follow from the sources. llama.cpp itself checks that a model
has every tensor it needs (`tokenizer.check`); `Family.needs` names those it would do without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES
from gguf.tensor_mapping import TensorNameMap

from worker.convert.checkpoint import Checkpoint
from worker.convert.config import Config
from worker.convert.family.dims import Dims
from worker.convert.quantize import to_float32


@dataclass(frozen=True, slots=True)
class Typed:
    """A metadata value with the name of its GGUF type, and for an array that of its items' type."""

    value: Any
    kind: str
    item_kind: str = ""


Value = bool | int | float | str | bytes | list[bool] | list[int] | list[float] | list[str] | Typed
Metadata = dict[str, Value]
"""Values by key, as `gguf` spells it: `{arch}` stands for the architecture, which
`output.write_layout` fills in."""
Setting = Value | Callable[[Config, Dims], Value | None] | None
"""A metadata value, or a function that reads it from the configuration; `None` omits the key."""
Array = npt.NDArray[Any]
Make = Callable[[Sequence[Array], Dims], Array]
"""Computes the values to write, in a stored type or as float32, from source tensors as stored (BF16
as `uint16`)."""


@dataclass(frozen=True, slots=True)
class Into:
    """What a source tensor becomes."""

    target: str
    """A name in the GGUF. A description omits the layer, and the suffix if it is `weight`; the
    completed rule has both, with `{i}` for the layer's number."""
    also: tuple[str, ...] = ()
    """Further tensors that are passed to `make`, by their names after the layer's or the member's
    number."""
    part: tuple[int, int] = (0, 1)
    """(i, n): part i of n equal parts of the rows; in a fused stack, of each expert's rows."""
    make: Make | None = None
    """Computes the tensor, or one member of a stack, from whole source tensors."""
    per_expert: bool = False
    """The sources are stacks, and `make` gets one expert of each at a time."""
    kind: str = ""
    """The ggml type of the bytes that `make` returns, whatever the output type; its source tensors
    may then have any type."""
    interleaved: bool = False
    """The rows of each rotary head hold one half after the other, and llama.cpp needs the halves
    interleaved."""
    plus: float = 0.0
    """Added to every value: Gemma stores its norm weights minus 1."""
    keep_f32: bool = False
    """The tensor is F32 in every output type."""


Sources = Mapping[str, str | Into | tuple[str | Into, ...]]
"""By the name in the checkpoint, after the layer's number; an empty tuple if only other tensors'
rules read it."""


class Place(NamedTuple):
    """The parts of a tensor's name in a checkpoint."""

    form: str
    """The name without the model's root and the member's number, and with `{i}` for the layer."""
    layer: int = -1
    member: int = -1
    """The number within a stack, such as the expert's; -1 outside stacks."""

    @classmethod
    def of(cls, name: str) -> Place:
        before, *rest = re.split(r"\.(\d+)(?=\.)", _ROOTS.sub("", name))
        form = before + "".join([".{i}", *rest[1::2]] if rest else "")
        return cls(form, *map(int, rest[:3:2]))


def transposed(sources: Sequence[Array], _d: Dims) -> Array:
    """Transpose a weight that is stored as (inputs, outputs)."""
    return sources[0].swapaxes(-1, -2)


def squeezed(sources: Sequence[Array], _d: Dims) -> Array:
    """Drop dimensions of size 1."""
    return sources[0].squeeze()


def decay(sources: Sequence[Array], _d: Dims) -> Array:
    """The decay A of a state space: the source stores log(-A)."""
    return -np.exp(to_float32(sources[0]).astype(np.float64)).astype(np.float32)


USUAL_MAKES: Mapping[str, Make] = {
    "ssm_a": decay,
    **dict.fromkeys(("ssm_conv1d", "shortconv.conv", "exp_probs_b.bias"), squeezed),
}


def halves(stack: str = "") -> tuple[Into, Into]:
    """Rules for a tensor with the rows of gate, then up; `stack` is `_exps`, `_shexp` or empty."""
    return Into(f"ffn_gate{stack}", part=(0, 2)), Into(f"ffn_up{stack}", part=(1, 2))


_COMMON_SOURCES: Sources = {
    "lm_head.weight": "output",
    "experts.gate_up_proj": halves("_exps"),
    "experts.up_proj": "ffn_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.router.weight": "ffn_gate_inp",
    "gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "dt_bias": "ssm_dt.bias",
    # MLX's names for stacked experts, and for the two parts of `kv_b_proj`.
    "embed_q.weight": "attn_k_b",
    "unembed_out.weight": "attn_v_b",
    **{f"switch_mlp.{x}_proj.weight": f"ffn_{x}_exps" for x in ("gate", "up", "down")},
}
"""Rules by the end of a name, for names that `gguf` lacks or has for some architectures only."""

F32_ALWAYS = frozenset(
    """ffn_gate_inp ffn_gate_inp_shexp position_embd token_types ssm_conv1d ssm_a ssm_d
    shortconv.conv altup_correct_coef altup_predict_coef time_mix_lerp_fused time_mix_w0
    time_mix_w1 time_mix_w2""".split()
)
"""Routers, positions and small filters are F32 in every output; so are norms, biases and scales."""
QKV_BIASES = "attn_q.bias attn_k.bias attn_v.bias"
_QK_NORMS = "attn_q_norm attn_k_norm"
_NEEDED = {
    "attention_bias": f"{QKV_BIASES} attn_output.bias",
    "mlp_bias": "ffn_gate.bias ffn_up.bias ffn_down.bias",
    **dict.fromkeys(("use_qkv_bias", "use_bias"), QKV_BIASES),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm"), _QK_NORMS),
    **dict.fromkeys(("use_conv_bias", "mamba_conv_bias"), "ssm_conv1d.bias"),
}
"""By setting, the tensors that a model has if it is true and lacks if it is false. Biases are only
required beside their weight."""
_PREDICTS_FURTHER = "they predict further tokens"
_IGNORED_EVERYWHERE = {
    r"(layers\.\d+\.)?mtp.*": _PREDICTS_FURTHER,
    r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias|position_ids)": "llama.cpp computes them",
}
"""`Family.ignored` for all families."""
_NOT_TEXT = (
    r"(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision"
    r"|embed_audio)\..*"
)
_ROOTS = re.compile(
    r"^(model\.language_model|language_model\.model|language_model|model|transformer|backbone"
    r"|bert|roberta|nomic_bert)\."
)
_SUFFIXES = ("weight", "bias", "scale")
_WITHOUT_SUFFIX = ("ssm_a", "ssm_d")
"""Tensors whose names in the GGUF have no suffix."""


@dataclass(frozen=True)
class Family:
    """Everything that the converter knows about one family of models."""

    architecture: str
    """`general.architecture`: the name of llama.cpp's implementation."""
    names: tuple[str, ...]
    """The values of `architectures` in `config.json` that mean this family."""
    multimodal: tuple[str, ...] = ()
    """The same for multimodal checkpoints, of which only the text model is converted."""
    sources: Sources = field(default_factory=dict)
    """Rules for tensors that the `gguf` package does not know, or not by this name or form."""
    tensors_of: str = ""
    """An architecture with the same tensors, if `gguf` does not know those of this one."""
    makes: Mapping[str, Make] = field(default_factory=dict)
    """By name in the GGUF, the function that computes the tensor from its usual source."""
    norm_plus: float = 0.0
    """Added to the weights of norms; see `Into.plus`."""
    interleaved: bool = False
    """llama.cpp rotates neighbouring dimensions; see `Into.interleaved`."""
    norm: Literal["rms", "layer", "none"] = "rms"
    """The kind of norms, for the key of their epsilon; `none` if `metadata` has that key."""
    rotary: float | None = None
    """The default share of a head that is rotated, in families where that is a setting."""
    windows: int = 0
    """By default, all layers but every n-th have a window; 0: only `metadata` sets windows."""
    n_used: str = "num_experts_per_tok"
    """The name of the setting for the number of experts per token."""
    common: Callable[[Family, Config, Dims], Metadata] | None = None
    """Computes the metadata to which `metadata` is applied; by default `metadata.decoder`."""
    metadata: Mapping[str, Setting] = field(default_factory=dict)
    """Further keys, other values, and keys to omit (`None`)."""
    config: Callable[[Config], Config] = field(default=lambda config: config)
    """Gives settings their usual names, and absent ones their values."""
    dims: Callable[[Config], Dims] = Dims.of
    section: str = ""
    """The key in `config.json` of the text model's section; empty for the whole file."""
    head: Literal["optional", "always", "never", "none"] = "optional"
    """Whether llama.cpp reads a separate output head: if there is one, always or never; `none` if
    the model has no head. A checkpoint may tie its head to the embedding."""
    applies: Callable[[Config], bool] = field(default=lambda config: True)
    """Distinguishes families that share a name in `config.json`."""
    ignores_window: bool = False
    """llama.cpp ignores the sliding window of this family and attends to the whole context."""
    ignores_extra_layers: bool = False
    """Layers after the last one predict further tokens and are left out."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions for the names of tensors that are left out, without the model's root;
    each with the reason."""
    needs: str | Callable[[Config], str] = ""
    """Names in the GGUF, as in `Into.target`, of tensors that the model has and llama.cpp would do
    without. A minus before a name: settings that seem to require it do not."""
    scales_as_llama3: bool = False
    """llama.cpp reads the factors of Llama 3's rope scaling in this family."""
    ropes: tuple[str, ...] = ()
    """The only kinds of rope scaling that llama.cpp implements; empty: the usual ones."""
    yarn: Mapping[str, object] = field(
        default_factory=lambda: {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    )
    """YaRN settings that llama.cpp fixes in this family, with its values."""
    extra_tensors: Callable[[Config, Dims], Mapping[str, Any]] = field(
        default=lambda config, dims: {}
    )
    """Small tensors computed from the configuration; a checkpoint's own ones replace them."""
    checkpoint_metadata: Callable[[Checkpoint, Dims], Metadata] = field(
        default=lambda checkpoint, dims: {}
    )
    """Metadata from tensor shapes, or from sections of `config.json` beside the text model's."""
    notes: Callable[[Config], Iterable[str]] = field(default=lambda config: ())
    """Known differences between llama.cpp's implementation and the source's framework."""
    requires: Mapping[str, object] = field(default_factory=lambda: {"hidden_act": "silu"})
    """The values of settings that llama.cpp implements; see `metadata.require`."""
    check: Callable[[Config, Dims], None] = field(default=lambda config, dims: None)
    """Refuses other settings that llama.cpp does not implement."""

    def text_part(self) -> Family:
        ignored = {**self.ignored, _NOT_TEXT: "they are for media, which --mmproj converts"}
        return replace(
            self, names=self.multimodal, multimodal=(), section="text_config", ignored=ignored
        )

    def why_left_out(self, name: str, d: Dims) -> str | None:
        if self.ignores_extra_layers and Place.of(name).layer >= d.n_layers:
            return _PREDICTS_FURTHER
        bare = _ROOTS.sub("", name)
        ignored = {**_IGNORED_EVERYWHERE, **self.ignored}
        return next((why for p, why in ignored.items() if re.fullmatch(p, bare)), None)

    def becomes(self, form: str) -> tuple[Into, ...] | None:
        """The rules for a tensor by its `Place.form`; `None` if the family does not know it."""
        before, layer, inner = form.rpartition("{i}.")
        rules = self.sources.get(inner)
        if rules is None:
            ends = (inner.split(".", n)[-1] for n in range(inner.count(".") + 1))
            rules = next((_COMMON_SOURCES[end] for end in ends if end in _COMMON_SOURCES), None)
        if rules is None:
            known = _gguf_names(self.tensors_of or self.architecture)
            name, suffix = _split_suffix(form)
            bases = known.get(name, known.get(form))
            if bases is None:
                return None
            rules = tuple(base if base in _WITHOUT_SUFFIX else f"{base}.{suffix}" for base in bases)
        within = "blk.{i}." if layer else ""
        listed = rules if isinstance(rules, tuple) else (rules,)
        return tuple(self._completed(each, within) for each in listed)

    def lacking(self, config: Config, present: Set[str]) -> Iterator[str]:
        """The names of `needs`, and those that settings require, that are not in `present`."""
        own, usual = self._own_needs(config), self._stated_needs(config, is_there=True)
        of_weights = [n for n in usual if n.replace("bias", "weight") in present or "." not in n]
        for name in (*own, *of_weights):
            if not present & {name, f"{name}.weight"} and name[0] != "-" and f"-{name}" not in own:
                yield name

    def denied(self, config: Config, present: Set[str]) -> Iterator[str]:
        """The names in `present` that settings rule out: the model's own class would ignore such
        tensors, and llama.cpp would use them."""
        allowed = {*self._own_needs(config), *self._stated_needs(config, is_there=True)}
        for name in self._stated_needs(config, is_there=False):
            if present & {name, f"{name}.weight"} and name not in allowed:
                yield name

    def _own_needs(self, config: Config) -> list[str]:
        return (self.needs(config) if callable(self.needs) else self.needs).split()

    def _stated_needs(self, config: Config, *, is_there: bool) -> list[str]:
        """The names in `_NEEDED` of the settings whose value is `is_there`."""
        settings = {**self.requires, **{k: v for k, v in config.values.items() if v is not None}}
        return " ".join(n for key, n in _NEEDED.items() if settings.get(key) is is_there).split()

    def _completed(self, given: str | Into, within: str) -> Into:
        into = Into(given) if isinstance(given, str) else given
        base, _, suffix = into.target.rpartition(".")
        if suffix not in _SUFFIXES:
            base, suffix = into.target, "" if into.target in _WITHOUT_SUFFIX else "weight"
        is_weight = suffix == "weight"
        name = base if is_weight or not suffix else f"{base}.{suffix}"
        is_norm = base.rstrip("_12").endswith("norm")
        return replace(
            into,
            target=within + (f"{base}.{suffix}" if suffix else base),
            make=into.make or self.makes.get(name, USUAL_MAKES.get(name)),
            interleaved=self.interleaved and base in ("attn_q", "attn_k"),
            plus=self.norm_plus if is_weight and is_norm and base != "ssm_norm" else 0.0,
            keep_f32=base in F32_ALWAYS or is_norm or not is_weight,
        )


def _split_suffix(form: str) -> tuple[str, str]:
    """Split a name from its suffix; without one, a parameter counts as a `weight`."""
    if form.endswith("_bias"):
        return form.removesuffix("_bias"), "bias"
    name, _, suffix = form.rpartition(".")
    return (name, suffix) if suffix in _SUFFIXES else (form, "weight")


@cache
def _gguf_names(architecture: str) -> Mapping[str, tuple[str, ...]]:
    """The names in checkpoints that `gguf` knows for an architecture, with those in the GGUF."""
    (number,) = (n for n, name in MODEL_ARCH_NAMES.items() if name == architecture)
    found: dict[str, tuple[str, ...]] = {}
    for tensors in (TensorNameMap.mappings_cfg, TensorNameMap.block_mappings_cfg):
        for tensor in MODEL_TENSORS[number]:
            base = TENSOR_NAMES[tensor].removeprefix("blk.{bid}.")
            for name in tensors.get(tensor, ()):
                form = _ROOTS.sub("", name).replace("{bid}", "{i}")
                found[form] = tuple({**dict.fromkeys(found.get(form, ())), base: None})
    return found
