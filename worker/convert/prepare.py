"""Plans a conversion and checks it: family, sizes, tensors, metadata, tokenizer.

Runs on the converter's main thread, before the output is written. Of the weights, it reads those
on which the plan depends, such as a head to compare with the embedding. llama.cpp's own converter
runs here, too, if it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gguf.constants import Keys

from worker.convert import architectures, manifest, plausible, reranker, upstream
from worker.convert.checkpoint import Checkpoint
from worker.convert.config import Config
from worker.convert.family import metadata as family_metadata
from worker.convert.family.defaults import check_settled, completed
from worker.convert.family.dims import Dims
from worker.convert.family.rules import Family, Metadata, Place
from worker.convert.malformed import bounded_faults
from worker.convert.output_types import FORMATS, OutputFormat
from worker.convert.pooling import MODULES, read_pooling
from worker.convert.quantize import tensor_type
from worker.convert.sampling import sampling
from worker.convert.tensor_plan import OutputTensor, plan_tensors
from worker.convert.tokenizer import sentencepiece
from worker.convert.tokenizer.chat_templates import chat_templates, template_metadata
from worker.convert.tokenizer.check import TokenCheck
from worker.convert.tokenizer.pre_tokenizers import UNKNOWN, unknown
from worker.convert.tokenizer.read import read_vocabulary
from worker.convert.tokenizer.special_tokens import special_tokens
from worker.convert.tokenizer.vocabulary import Vocabulary
from worker.errors import ConfigError, ModelError
from worker.models.checksum import sha256_of_file
from worker.models.reference import name_of
from worker.models.scratch import Scratch


@dataclass(frozen=True, slots=True)
class Options:
    outtype: str = "q8_0"
    pre_tokenizer: str | None = None
    """Used instead of the one that `tokenizer.json` defines."""
    name: str | None = None
    """`general.name`; by default the name of the repository or folder."""
    imatrix: Path | None = None
    """Importance matrix for the types that llama.cpp's quantiser makes."""
    n_threads: int | None = None
    scratch: Path | None = None
    """Folder for the temporary file of llama.cpp's own converter."""
    projector: bool = False
    """Convert the projector of pictures and sounds instead of the model."""

    @property
    def format(self) -> OutputFormat:
        return FORMATS[self.outtype]


@dataclass(slots=True)
class Conversion:
    """A checkpoint and everything about its GGUF except the weights."""

    checkpoint: Checkpoint
    options: Options
    architecture: str
    metadata: Metadata
    tensors: list[OutputTensor]
    notes: list[str] = field(default_factory=list)
    """Sentences for the user: what was left out, what differs from the source's own framework."""
    vocabulary: Vocabulary | None = None
    """`None` for a projector, and if llama.cpp's own converter read it."""
    scratch: Scratch | None = None
    """Where llama.cpp's own converter left its file."""

    def close(self) -> None:
        self.checkpoint.close()
        if self.scratch is not None:
            self.scratch.cleanup()


def prepare_checked(source: Path, options: Options) -> Conversion:
    """Run `prepare`, let llama.cpp load the planned model, and compare its token ids with the
    source's. A known difference becomes a note and a metadata key. A projector is only prepared.

    Raises:
        ModelError: as for `prepare`; or llama.cpp refuses the model, or ids differ unexpectedly.
        ConfigError: `options.pre_tokenizer` is not a name that llama.cpp knows.
    """
    if options.projector:
        return prepare(source, options)
    with TokenCheck(source) as tokens:
        made = prepare(source, options)
        try:
            checked = tokens.check(made.architecture, made.metadata, made.tensors)
        except BaseException as error:
            made.close()
            if isinstance(error, ModelError) and UNKNOWN in error.message and options.pre_tokenizer:
                raise unknown(options.pre_tokenizer) from None
            raise
    if checked.differing:
        sentence = (  # `verify` compares it with that in the file, so its words must not change.
            f"token ids differ from the source's for {len(checked.differing)} of {checked.n_texts} "
            f"test texts: llama.cpp splits otherwise {checked.reason}, as in "
            f"{checked.differing[0]!r}"
        )
        made.metadata[manifest.DIFFERENCE] = sentence
        made.notes.append(sentence)
    return made


def prepare(source: Path, options: Options) -> Conversion:
    """Plan the conversion of the checkpoint in the folder `source`.

    Raises:
        ModelError: the checkpoint's small files or headers are invalid or not supported.
    """
    with bounded_faults(source):
        return _prepare(source, options)


def _prepare(source: Path, options: Options) -> Conversion:
    importance = _importance(options)  # A missing matrix is reported before the weights are read.
    checkpoint = Checkpoint.open(source)
    conversion = _planned(checkpoint, options)
    try:
        settings = sampling(checkpoint)
        checkpoint.forget_json()
        wanted = options.format.tensor_type or checkpoint.lossless_type()
        conversion.tensors = [
            replace(t, kind=t.kind or tensor_type(wanted, t.shape, t.keep_f32))
            for t in conversion.tensors
        ]
        conversion.metadata = {
            Keys.General.TYPE: "mmproj" if options.projector else "model",
            Keys.General.NAME: _safe_name(options.name or name_of(source), conversion.vocabulary),
            Keys.General.FILE_TYPE: options.format.file_type,
            Keys.General.QUANTIZATION_VERSION: 2,
            # Before the vocabulary, so that `patch` soon finds the digest's placeholder.
            **manifest.provenance(source, options.outtype, options.name),
            **importance,
            **({} if options.projector else settings),
            **conversion.metadata,
        }
    except BaseException:
        conversion.close()
        raise
    return conversion


def _planned(checkpoint: Checkpoint, options: Options) -> Conversion:
    config = Config(checkpoint.config)
    family = architectures.family_of(config)
    scripts = upstream.classes(options.projector)
    if options.projector and options.format.tensor_type is None:
        raise ModelError(f"a projector can be f32, f16, bf16 or q8_0, not {options.outtype}")
    if family is not None and not options.projector:
        return _by_family(checkpoint, family, config, options)
    if scripts.intersection(map(str, config.items("architectures"))):
        return _by_script(checkpoint, options)
    if options.projector:
        raise ModelError(f"{config.name}: the projector of this architecture cannot be converted")
    raise architectures.unknown(config, scripts)


def _by_family(
    checkpoint: Checkpoint, family: Family, config: Config, options: Options
) -> Conversion:
    config = text_config(family, config)
    plausible.check_config(config, checkpoint)
    dims = family.dims(config)
    plausible.check_dims(config, dims, checkpoint)
    family_metadata.check(family, config, dims)
    filters = [t for name, t in checkpoint.tensors.items() if name.endswith(".conv1d.weight")]
    if any(len(t.shape) > 2 and t.shape[1] > t.shape[2] for t in filters):
        # MLX stores filters as (channels, kernel, 1), and has already added `norm_plus`.
        family = replace(family, norm_plus=0.0)
    pooling = read_pooling(checkpoint)
    if pooling is not None and family.head != "always":
        family = replace(family, head="none")
    ranks = pooling is None and reranker.is_reranker(checkpoint.folder, family, config)
    vocabulary = read_vocabulary(checkpoint, dims.n_vocab, options.pre_tokenizer)
    if ranks:
        has_head = "lm_head.weight" in checkpoint.tensors
        family, dims = reranker.with_classifier(family, config, dims, vocabulary, has_head=has_head)
    metadata: Metadata = {
        **family_metadata.of_family(family, config, dims),
        **family.checkpoint_metadata(checkpoint, dims),
        **({} if pooling is None else {Keys.LLM.POOLING_TYPE: int(pooling)}),
    }
    if metadata.get(Keys.Attention.CAUSAL) is False and family.head != "none":
        why = f"this is an embedding model (is_causal is false), but no {MODULES} has its pooling"
        raise ModelError(f"{config.name}: {why}")
    tensors = plan_tensors(checkpoint, family, config, dims)
    made = Conversion(checkpoint, options, family.architecture, metadata, tensors)
    prompts = reranker.PROMPTS if ranks else {}
    embeds = Keys.LLM.POOLING_TYPE in metadata or metadata.get(Keys.Attention.CAUSAL) is False
    _add_vocabulary(made, vocabulary, embeds=embeds, prompts=prompts)
    made.notes += _notes(family, config, tensors)
    made.notes += _left_out(checkpoint, family, dims, tensors)
    return made


def text_config(family: Family, whole: Config) -> Config:
    """The settings of the text model, with the defaults of its class for absent keys."""
    config = whole
    if config.has(family.section):  # A text model alone may have everything on one level.
        config = config.section(family.section)
        if whole.has(tie := "tie_word_embeddings"):
            # Either level ties the head, but not a section that only repeats its class's default.
            default = completed(config.changed(**{tie: None})).values.get(tie)
            ties = config.values.get(tie, False) and not default
            config = config.changed(**{tie: whole.values[tie] or ties})
    config = config.changed(model_type=config.text("model_type", whole.text("model_type", "")))
    check_settled(config)
    return family.config(completed(config))


def _by_script(checkpoint: Checkpoint, options: Options) -> Conversion:
    """Let llama.cpp's own converter read the weights. A projector's tensors are copied unchanged.
    A model's vocabulary is read by this package if its tokenizer is of a known kind."""
    scratch = Scratch(options.scratch)
    try:
        header = upstream.convert(
            checkpoint, scratch.path, options.outtype if options.projector else ""
        )
        metadata = upstream.metadata(header) | {manifest.SCRIPT: "convert_hf_to_gguf.py"}
        tensors = upstream.tensors(header, unchanged=options.projector)
        made = Conversion(
            checkpoint, options, header.architecture, metadata, tensors, scratch=scratch
        )
        made.notes.append("llama.cpp's own converter read the weights")
        if not options.projector:
            _set_vocabulary(made)
        return made
    except BaseException:
        scratch.cleanup()
        raise


def _set_vocabulary(made: Conversion) -> None:
    (n_vocab,) = (t.shape[0] for t in made.tensors if t.name == "token_embd.weight")
    try:
        vocabulary = read_vocabulary(made.checkpoint, n_vocab, made.options.pre_tokenizer)
    except ModelError as error:
        if Keys.Tokenizer.LIST not in made.metadata:
            raise
        made.notes.append(f"llama.cpp's own converter read the vocabulary, too: {error.message}")
        return
    embeds = Keys.LLM.POOLING_TYPE.format(arch=made.architecture) in made.metadata
    for key in [key for key in made.metadata if key.startswith("tokenizer.")]:
        del made.metadata[key]
    for t in (t for t in made.tensors if t.name == "token_types.weight"):
        made.metadata[Keys.Tokenizer.TOKEN_TYPE_COUNT] = t.n_elements // t.shape[-1]
    _add_vocabulary(made, vocabulary, embeds=embeds)


def _add_vocabulary(
    made: Conversion, vocabulary: Vocabulary, *, embeds: bool, prompts: Mapping[str, str] = {}
) -> None:
    """Add vocabulary, special tokens and chat templates; `prompts` are further templates."""
    made.metadata |= vocabulary.metadata()
    made.metadata |= special_tokens(made.checkpoint, vocabulary, embeds=embeds)
    tokenizer = made.checkpoint.json("tokenizer.json")
    if made.architecture == "gemma4" and vocabulary.model == "llama" and tokenizer:
        made.metadata |= sentencepiece.by_merges(tokenizer)
    made.metadata |= template_metadata({**chat_templates(made.checkpoint), **prompts})
    made.vocabulary = vocabulary
    made.notes += vocabulary.notes


def _importance(options: Options) -> Metadata:
    if options.imatrix is None:
        return {}
    if options.format.tensor_type is not None:
        raise ConfigError(f"--imatrix is given, but nothing uses it for {options.outtype}")
    if not options.imatrix.is_file():
        raise ModelError(f"--imatrix {options.imatrix} is not a file", path=str(options.imatrix))
    return {manifest.IMATRIX: sha256_of_file(options.imatrix)}


def _notes(family: Family, config: Config, tensors: Iterable[OutputTensor]) -> Iterator[str]:
    yield from family.notes(config)
    pieces = {t.name: t.pieces for t in tensors}
    head = pieces.get("output.weight")
    if (
        head
        and config.values.get("tie_word_embeddings")
        and head != pieces.get("token_embd.weight")
    ):
        yield "the output head is kept: tie_word_embeddings is true, but the embedding differs"
    window = config.values.get("sliding_window")
    if family.ignores_window and isinstance(window, int) and window > 0:
        if window < config.integer("max_position_embeddings"):
            yield f"llama.cpp attends to the whole context, not to a window of {window}"


def _left_out(
    checkpoint: Checkpoint, family: Family, d: Dims, tensors: Iterable[OutputTensor]
) -> Iterator[str]:
    used = {info.name for t in tensors for piece in t.pieces for info in piece.sources}
    by_reason: dict[str, list[str]] = {}
    for name in sorted(checkpoint.tensors):
        why = family.why_left_out(name, d)
        if why is None and name not in used:
            rules = family.becomes(Place.of(name).form) or ()
            if any(rule.target == "output.weight" for rule in rules):
                why = "the embedding has the same values and takes its place"
        if why:
            by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        yield f"left out {', '.join(names[:2])}{more}: {why}"


def _safe_name(name: str, vocabulary: Vocabulary | None) -> str:
    """The model's name, changed if llama.cpp would infer the wrong tokenizer from it.

    If the name contains "phi-3", llama.cpp lets special tokens absorb the spaces after them, and
    looks up four tokens without checking that they exist.
    """
    looked_up = {"</s>", "<unk>", "<s>", "<|endoftext|>"}
    if vocabulary and vocabulary.special_rstrip and looked_up <= set(vocabulary.tokens):
        return name if re.search(r"(?i)phi-?3", name) else f"{name} (Phi-3 tokens)"
    return re.sub(r"(?i)phi-?(3)", r"phi \1", name)
