"""What a family's description says, and the rules for its tensors that follow from it.

A description names tensors by the GGUF's names without layer and suffix, as the `gguf` package has
them. That package also knows what checkpoints call them. Only what differs has to be said: another
source, a part of it, a function that reorders values. Shapes are not said: they are those of the
sources, and llama.cpp itself checks them (`tokenizer.check`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf.constants import MODEL_TENSOR, TENSOR_NAMES
from gguf.tensor_mapping import TensorNameMap

from worker.convert.checkpoint import Checkpoint
from worker.convert.config import Config
from worker.convert.family.dims import Dims
from worker.convert.quantize import to_float32


@dataclass(frozen=True, slots=True)
class Typed:
    """A value of a GGUF with its type, and an array's with that of its items, by their numbers."""

    value: Any
    types: tuple[int, ...]


Value = bool | int | float | str | bytes | list[bool] | list[int] | list[float] | list[str] | Typed
Metadata = dict[str, Value]
"""Values by key as `gguf` has it: `{arch}` stands for the architecture, which `output.header` fills
in."""
Setting = Value | Callable[[Config, Dims], Value | None]
"""A value of the metadata, or how the configuration gives it; `None` leaves its key out."""
Array = npt.NDArray[Any]
Make = Callable[[Sequence[Array], Dims], Array]
"""Computes the values to write, in a stored type or as float32, from source tensors as they are
stored (BF16 as `uint16`)."""


@dataclass(frozen=True, slots=True)
class From:
    """The source of a tensor, where it is more than another name."""

    source: str
    """A name in the checkpoint: behind `Family.layer` for a tensor of a layer. `{e}` stands for the
    member of a stack (an expert, a head): the output's first axis, in order."""
    also: tuple[str, ...] = ()
    """Further source tensors that `make` is given."""
    part: tuple[int, int] = (0, 1)
    """Which of how many equal parts of the rows, or of those of each expert in a stack."""
    make: Make | None = None
    """Computes the tensor, or one member of a stack, from whole source tensors."""
    per_expert: bool = False
    """`make` gets one expert of each source, which is a stack, at a time."""
    kind: str = ""
    """The ggml type of the bytes that `make` returns, whatever the output type; its source tensors
    may then have any type."""


Sources = Mapping[str, "str | From | tuple[str | From, ...]"]
"""By the GGUF's name, with a suffix if it is not the weight; several are alternatives."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What one kind of tensor becomes. `{i}` in a name stands for the layer."""

    target: str
    origin: From
    optional: bool = False
    """Some checkpoints of the family lack it: a bias, or an output head that is tied."""
    interleaved: bool = False
    """The rows of each rotary head hold one half after the other, and llama.cpp needs the halves
    interleaved."""
    plus: float = 0.0
    """This is added to every value: Gemma stores its norm weights less one."""
    on: str = ""
    """Only layers of this kind have the tensor (see `Dims.kinds`)."""
    keep_f32: bool = False
    """The tensor is F32 in every output type."""


def transposed(sources: Sequence[Array], _d: Dims) -> Array:
    """Transpose a weight that is stored as (inputs, outputs)."""
    return np.ascontiguousarray(sources[0].swapaxes(-1, -2))


def squeezed(sources: Sequence[Array], _d: Dims) -> Array:
    """Keeps the values, without dimensions of one."""
    return sources[0].squeeze()


def decay(sources: Sequence[Array], _d: Dims) -> Array:
    """The decay A of a state space: the source stores log(-A)."""
    return -np.exp(to_float32(sources[0]).astype(np.float64)).astype(np.float32)


USUAL_MAKES: Mapping[str, Make] = {
    "ssm_a": decay,
    **dict.fromkeys(("ssm_conv1d", "shortconv.conv", "exp_probs_b.bias"), squeezed),
}

F32_ALWAYS = frozenset(
    """ffn_gate_inp ffn_gate_inp_shexp position_embd token_types ssm_conv1d ssm_a ssm_d
    shortconv.conv altup_correct_coef altup_predict_coef time_mix_lerp_fused time_mix_w0
    time_mix_w1 time_mix_w2""".split()
)
"""Routers, positions and small filters; so are all norms, biases and scales."""
MULTIMODAL_ROOTS = ("model.", "model.language_model.", "language_model.model.")
NOT_TEXT = (
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|audio_tower|embed_vision"
    r"|embed_audio)\..*"
)
_WORD = re.compile(r"(?P<bare>=?)(?P<name>[\w.]+?)(?P<bias>[+~]?)(?P<optional>\??)")
_SUFFIXES = (".weight", ".bias", ".scale")


@dataclass(frozen=True)
class Family:
    """Everything that the converter knows about one family of models."""

    architecture: str
    """`general.architecture`: the name of llama.cpp's implementation."""
    names: tuple[str, ...]
    """The values of `architectures` in `config.json` that mean this family."""
    layers: str | Mapping[str, str]
    """The tensors of a layer, of each kind where layers differ (see `Dims.kinds`).

    Words: a `?` marks a tensor that some checkpoints lack, a `+` one with a bias, a `~` one with a
    bias in some checkpoints, a `=` before it one whose name in the GGUF has no suffix.
    """
    model: str = "token_embd output_norm output?"
    """The tensors outside of the layers."""
    multimodal: tuple[str, ...] = ()
    """The same for checkpoints with more than a text model, whose other tensors are left out."""
    layer: str = "model.layers.{i}"
    """The beginning of a layer's names in the checkpoint."""
    sources: Sources = field(default_factory=dict)
    """Where names are others than those that the `gguf` package knows, or not names alone; also
    `kind:name`."""
    makes: Mapping[str, Make] = field(default_factory=dict)
    """What computes a tensor from the source of the usual name."""
    norm_plus: float = 0.0
    """This is added to the weights of norms; see `Rule.plus`."""
    interleaved: bool = False
    """llama.cpp rotates neighbouring dimensions; see `Rule.interleaved`."""
    norm: Literal["rms", "layer", "none"] = "rms"
    """What norms are, for the metadata; `none` if `metadata` says it."""
    rotary: float | None = None
    """The share of a head that is rotated by default, in families where it is a setting."""
    windows: int = 0
    """All but every so many-th layer attend to a window by default; 0: `metadata` says it."""
    n_used: str = "num_experts_per_tok"
    """The setting that says how many experts a token uses."""
    common: Callable[[Family, Config, Dims], Metadata] | None = None
    """The metadata before `metadata`; by default that of a decoder with rotary positions."""
    metadata: Mapping[str, Setting] = field(default_factory=dict)
    """Further keys, or other values of them."""
    dims: Callable[[Config], Dims] = Dims.of
    roots: tuple[str, ...] = ("model.",)
    """Prefixes of tensor names: first the one in the rules, then those of other checkpoints."""
    section: str = ""
    """The key in `config.json` of the text model's section; empty for the whole file."""
    head: Literal["optional", "always", "never", "none"] = "optional"
    """Whether llama.cpp reads a separate output head in this family. A checkpoint may tie its head
    to the embedding; encoders have none."""
    applies: Callable[[Config], bool] = field(default=lambda config: True)
    """Distinguishes families that have the same name in `config.json`."""
    ignores_window: bool = False
    """llama.cpp ignores the sliding window of this family and attends to the whole context."""
    ignores_extra_layers: bool = False
    """Layers after the last one predict further tokens and are left out."""
    ignored: tuple[str, ...] = ()
    """Regular expressions for tensors that are left out: the model does not need them."""
    scales_as_llama3: bool = False
    """llama.cpp reads the factors of Llama 3's rope scaling in this family."""
    ropes: tuple[str, ...] = ()
    """The only kinds of rope scaling that llama.cpp implements; empty: `metadata.rope` says."""
    extra_tensors: Callable[[Config, Dims], Mapping[str, Any]] = field(
        default=lambda config, dims: {}
    )
    """Small tensors computed from the configuration; a checkpoint's own ones replace them."""
    tensor_metadata: Callable[[Checkpoint, Dims], Metadata] = field(
        default=lambda checkpoint, dims: {}
    )
    """Metadata that the checkpoint stores as small tensors."""
    notes: Callable[[Config], Iterable[str]] = field(default=lambda config: ())
    """Known differences between llama.cpp's implementation and the source's framework."""
    requires: Mapping[str, object] = field(default_factory=lambda: {"hidden_act": "silu"})
    """Settings that llama.cpp implements, see `metadata.require`."""
    check: Callable[[Config, Dims], None] = field(default=lambda config, dims: None)
    """Refuses other settings that llama.cpp does not implement."""

    def by_kind(self) -> Mapping[str, str]:
        return {"": self.layers} if isinstance(self.layers, str) else self.layers

    @cached_property
    def rules(self) -> Mapping[str, tuple[Rule, ...]]:
        """What becomes of each tensor, by its name in the checkpoint."""
        found: dict[str, tuple[Rule, ...]] = {}
        rules = [*self._of(self.model, "", in_layer=False)]
        for kind, words in self.by_kind().items():
            rules += self._of(words, kind, in_layer=True)
        for rule in rules:
            found[rule.origin.source] = (*found.get(rule.origin.source, ()), rule)
        return found

    def text_part(self) -> Family:
        return replace(
            self,
            names=self.multimodal,
            multimodal=(),
            section="text_config",
            roots=MULTIMODAL_ROOTS,
            ignored=(*self.ignored, NOT_TEXT),
        )

    def _of(self, words: str, kind: str, *, in_layer: bool) -> Iterator[Rule]:
        for word in words.split():
            match = _WORD.fullmatch(word)
            assert match is not None, word
            name, optional = match["name"], bool(match["optional"])
            base, suffix = name, "weight"
            if name.endswith(_SUFFIXES):
                base, _, suffix = name.rpartition(".")
            yield from self._rules(base, suffix, kind, in_layer, optional, bare=bool(match["bare"]))
            if match["bias"]:
                optional = optional or match["bias"] == "~"
                yield from self._rules(base, "bias", kind, in_layer, optional)

    def _rules(
        self, base: str, suffix: str, kind: str, in_layer: bool, optional: bool, bare: bool = False
    ) -> Iterator[Rule]:
        plus = self.norm_plus if suffix == "weight" and is_norm(base) else 0.0
        for origin in self._origins(base, suffix, kind, in_layer):
            yield Rule(
                target=("blk.{i}." if in_layer else "") + (base if bare else f"{base}.{suffix}"),
                origin=origin,
                optional=optional,
                interleaved=self.interleaved and base in ("attn_q", "attn_k"),
                plus=0.0 if base == "ssm_norm" else plus,
                on=kind,
                keep_f32=base in F32_ALWAYS or is_norm(base) or suffix != "weight",
            )

    def _origins(self, base: str, suffix: str, kind: str, in_layer: bool) -> Iterator[From]:
        """Every source that the tensor may have, the usual one first."""
        name = base if suffix == "weight" else f"{base}.{suffix}"
        given = self.sources.get(f"{kind}:{name}", self.sources.get(name))
        if given is None and suffix == "bias" and base in self.sources:
            given = self.sources[base]
        if given is None:
            plain: Iterable[str | From] = _known_names(base, self._beginning(in_layer))
        else:
            within = f"{self.layer}." if in_layer else ""
            plain = [_within(within, each) for each in _listed(given)]
        make = self.makes.get(name, USUAL_MAKES.get(name))
        for source in plain:
            if isinstance(source, From):
                yield source
            elif base.endswith("_exps") and "{e}" not in source and given is None:
                yield from _of_experts(base, suffix, source)
            else:
                for form in _forms(source, suffix, is_given=name in self.sources):
                    yield From(form, make=make)

    def _beginning(self, in_layer: bool) -> str:
        return self.layer.replace("{i}", "{bid}") + "." if in_layer else self.roots[0]


def _listed(given: str | From | tuple[str | From, ...]) -> tuple[str | From, ...]:
    return given if isinstance(given, tuple) else (given,)


def _within(layer: str, source: str | From) -> str | From:
    if isinstance(source, From):
        also = tuple(layer + name for name in source.also)
        return replace(source, source=layer + source.source, also=also)
    return layer + source


def _known_names(base: str, beginning: str) -> list[str]:
    """What the `gguf` package knows checkpoints to call a tensor."""
    found: list[str] = []
    for tensors in (TensorNameMap.mappings_cfg, TensorNameMap.block_mappings_cfg):
        for tensor, names in tensors.items():
            if _word(tensor) == base:
                found += [n for n in names if n.startswith((beginning, "lm_head"))]
    assert found, f"gguf knows no {base} of {beginning}"
    return [name.replace("{bid}", "{i}") for name in dict.fromkeys(found)]


def _word(tensor: MODEL_TENSOR) -> str:
    return str(TENSOR_NAMES[tensor]).removeprefix("blk.{bid}.")


def _forms(source: str, suffix: str, *, is_given: bool) -> tuple[str, ...]:
    """A name with its suffix; parameters that are no layers' weights have none."""
    if suffix == "weight":
        return f"{source}.weight", source
    if is_given and suffix != "bias":
        return (source,)
    return f"{source}.{suffix}", f"{source}_{suffix}", source


def _of_experts(base: str, suffix: str, source: str) -> Iterator[From]:
    """Experts that are stored one by one, stacked, or stacked with gate and up in one."""
    before, _, last = source.rpartition(".")
    yield From(f"{before}.{{e}}.{last}.{suffix}")
    yield From(f"{source}.{suffix}")
    yield From(source)
    fused = f"{before}.gate_up_proj"
    if base == "ffn_gate_exps":
        yield From(fused, part=(0, 2))
    elif base == "ffn_up_exps":
        yield From(fused, part=(1, 2))


def is_norm(word: str) -> bool:
    return word.rstrip("_12").endswith("norm")
