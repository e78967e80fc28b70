"""A loaded GGUF: its weights on their device or devices, its vocabulary and its metadata.

Belongs to the engine process. The vocabulary functions are thread-safe, as they only read. Only the
owner loads and closes the model.
"""

from __future__ import annotations

import ctypes
import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from worker.errors import ModelError
from worker.llama import library
from worker.llama.source_tokenizer import (
    LSTRIP,
    NEUTRAL,
    RSTRIP,
    SPLIT,
    STEPS,
    WHOLE_WORDS,
    SourceTokenizer,
    SourceWords,
    any_of,
    recorded,
)

MAX_TEXT_CHARS = 2048
"""Longer texts are cut at special tokens before llama.cpp tokenises them."""
LONGEST_WORD = 4096
"""The longest run of characters, all or none of them white space. For a BPE vocabulary, llama.cpp
may split words by regular expressions that recurse once per character; a longer run could overflow
the thread's stack, which kills the process."""

ESCAPED = "surrogateescape"
"""The error handler by which a `str` carries bytes that are not valid UTF-8."""

Metadata = Mapping[str, int | float | bool | str]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Where and how the weights are loaded."""

    devices: tuple[library.Device, ...] = ()
    """The GPUs that hold everything; without one, everything stays on the CPU."""
    layers: tuple[int, ...] = ()
    """The number of layers on each of several GPUs, in order; the output layer counts as one."""
    mmap: bool = True
    mlock: bool = False
    vocab_only: bool = False
    no_alloc: bool = False
    """Read the metadata and plan the buffers, but allocate and read no weights."""
    tensor_placement: Sequence[tuple[str, int]] = ()
    """Pairs of (tensor name pattern, native buffer type) that override the layer's device."""
    metadata: Metadata = field(default_factory=dict)
    """Values that replace the file's."""
    without_vocabulary: tuple[str, int] | None = None
    """(architecture, number of tokens): skips reading the tokens, if only sizes are needed."""
    mtp: bool = False
    """Whether the layers for multi-token prediction are loaded, too."""
    extra_buffer_types: bool = True
    """Whether the CPU backend may repack weights into faster layouts during the load."""


class InfillTokens(NamedTuple):
    """The special tokens of a prompt whose middle is to be filled in."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None


_ShortPiece = ctypes.c_char * 32
"""Holds most pieces, and is faster to create than with `create_string_buffer`."""
_MOST_PIECE_BYTES = 256
_UNKNOWN, _CONTROL, _USER_DEFINED, _LSTRIP = 1 << 0, 1 << 3, 1 << 4, 1 << 7
"""`LLAMA_TOKEN_ATTR_UNKNOWN`, `…_CONTROL`, `…_USER_DEFINED` and `…_LSTRIP`."""
_BPE = 2
"""`LLAMA_VOCAB_TYPE_BPE`."""
_SHORT_WORDS = re.compile(rf"(?:\S{{1,{LONGEST_WORD}}}+(?!\S)|\s{{1,{LONGEST_WORD}}}+(?!\s))*+")
"""Matches, in one pass, up to the first word that is longer than `LONGEST_WORD`."""
_SEAM = re.compile(r"(?<=\w)(?=\W)")
_EOG_LINE = re.compile(r"EOG token +=\s*(\d+) ")
"""llama.cpp's log line for each end-of-generation token; a test checks the wording."""


class Model:
    """llama.cpp's model object; no native pointer leaves this room.

    Raises `ModelError` if llama.cpp refuses the file; the message quotes a line of its log.
    """

    def __init__(
        self,
        path: str,
        options: LoadOptions | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        flat = self._flat = library.load()
        options = self.options = options or LoadOptions()
        self._split = recorded(path, SPLIT)
        replaced = _replaced_metadata(self._split, recorded(path, STEPS), options)
        self._params = _Params(flat, options, replaced, on_progress)
        with library.log.capture() as lines:
            pointer = flat.llama_model_load_from_file(os.fsencode(path), self._params.native)
        self.load_log: tuple[str, ...] = tuple(lines)
        """llama.cpp's log of the load, which the residency proof reads."""
        if not pointer:
            raise ModelError(f"llama.cpp cannot load {path}: {library.reason(lines)}", path=path)
        self.pointer = pointer
        self.vocab = flat.llama_model_get_vocab(pointer)
        self.size_bytes = int(flat.llama_model_size(pointer))
        self.n_params = int(flat.llama_model_n_params(pointer))
        self.n_embd = int(flat.llama_model_n_embd_out(pointer))
        self.n_cls_out = int(flat.llama_model_n_cls_out(pointer))
        self.n_vocab = int(flat.llama_vocab_n_tokens(self.vocab))
        self.bos, self.eos = self._special("bos"), self._special("eos")
        self.adds_bos = self.bos is not None and bool(flat.llama_vocab_get_add_bos(self.vocab))
        self.trained_context_length = int(flat.llama_model_n_ctx_train(pointer))
        is_hybrid = flat.llama_model_is_hybrid(pointer)
        self.is_recurrent = bool(is_hybrid or flat.llama_model_is_recurrent(pointer))
        """Whether some layers have a recurrent state, which cannot be cut."""
        self.adapters: list[Any] = []
        """Pointers to the loaded adapters; llama.cpp frees them with the model."""
        self.directions: npt.NDArray[np.float32] | None = None
        """The control vector, which each layer from the second on adds to its output:
        (layers - 1, n_embd). Applied by contexts that are created after it is set."""

    def close(self) -> None:
        """Free the weights. All contexts of this model must be closed first."""
        if self.pointer:
            self._flat.llama_model_free(self.pointer)
            self.pointer = None

    def load_adapter(self, path: str) -> None:
        """Load a LoRA adapter beside the weights.

        NOTE: llama.cpp requires it before the context is created.

        Raises:
            ModelError: llama.cpp refuses the file.
        """
        with library.log.capture() as lines:
            pointer = self._flat.llama_adapter_lora_init(self.pointer, os.fsencode(path))
        # The residency proof reads the lines about its buffers.
        self.load_log += tuple(lines)
        if not pointer:
            raise ModelError(
                f"llama.cpp cannot load the adapter {path}: {library.reason(lines)}", path=path
            )
        self.adapters.append(pointer)

    # --- properties ------------------------------------------------------------------

    def metadata(self, key: str) -> str | None:
        """A scalar of the GGUF header as text; `None` if the key is absent or an array."""
        if (value := self.options.metadata.get(key)) is not None:
            return str(value)
        read, name = self._flat.llama_model_meta_val_str, key.encode()
        if (length := read(self.pointer, name, None, 0)) < 0:
            return None
        buffer = ctypes.create_string_buffer(length + 1)
        read(self.pointer, name, buffer, length + 1)
        return buffer.raw[:length].decode("utf-8", "replace")

    def chat_template(self, name: str | None = None) -> str | None:
        """The template named `name` (`tool_use`…), or the default one."""
        key = "tokenizer.chat_template" + (f".{name}" if name else "")
        if (source := self.options.metadata.get(key)) is not None:
            return str(source)
        text = self._flat.llama_model_chat_template(self.pointer, name.encode() if name else None)
        return text.decode("utf-8", "replace") if text else None

    # --- vocabulary --------------------------------------------------------------------

    def _special(self, name: str) -> int | None:
        """The token that llama.cpp's vocabulary has under this name, if it has one."""
        token = int(getattr(self._flat, f"llama_vocab_{name}")(self.vocab))
        return token if token >= 0 else None

    @cached_property
    def pair_ends(self) -> list[int]:
        """Tokens between the texts of a ranked pair; the first one also ends the second text."""
        flat, vocab = self._flat, self.vocab
        sep = int(flat.llama_vocab_sep(vocab))
        eos = sep if self.eos is None else self.eos
        ends = [eos] if flat.llama_vocab_get_add_eos(vocab) else []
        return [*ends, sep] if flat.llama_vocab_get_add_sep(vocab) else ends

    @cached_property
    def end_of_turn(self) -> int:
        """The token that ends a turn: EOT, else EOS, else the smallest token in `eog`, else 0."""
        found = (each for each in (self._special("eot"), self.eos) if each is not None)
        return next(found, min(self.eog, default=0))

    @cached_property
    def eog(self) -> frozenset[int]:
        """All end-of-generation tokens: EOS, EOT, end of turn…"""
        matches = (_EOG_LINE.search(line) for line in self.load_log)
        return frozenset(int(match[1]) for match in matches if match)

    @cached_property
    def control(self) -> frozenset[int]:
        """Control tokens, which stand for no text."""
        return self._tokens_with(_CONTROL)

    @cached_property
    def user_defined(self) -> frozenset[int]:
        """Tokens that llama.cpp finds in any text, even if control tokens are not parsed."""
        return self._tokens_with(_USER_DEFINED) - self.control  # some tokens are marked as both

    def _tokens_with(self, attribute: int) -> frozenset[int]:
        return frozenset(t for t, found in enumerate(self._attributes) if found & attribute)

    @cached_property
    def _attributes(self) -> array[int]:
        """The attributes of each token; read only once, as this is slow for a large vocabulary."""
        get = partial(self._flat.llama_vocab_get_attr, self.vocab)
        return array("i", map(get, range(self.n_vocab)))

    @cached_property
    def infill(self) -> InfillTokens | None:
        """`None` unless the vocabulary marks prefix, suffix and middle."""
        prefix, suffix, middle, *others = (
            self._special(f"fim_{part}") for part in ("pre", "suf", "mid", "rep", "sep")
        )
        if prefix is None or suffix is None or middle is None:
            return None
        return InfillTokens(prefix, suffix, middle, *others)

    def token_text(self, token: int) -> str:
        """The vocabulary's entry, such as `<|im_end|>`."""
        return bytes(self._flat.llama_vocab_get_text(self.vocab, token)).decode("utf-8", "replace")

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`; `add_special` adds BOS and EOS as the model wants them."""
        if self._source_tokenizer is not None:
            ids = self._source_tokenizer.ids(text, parse_special=parse_special)
        elif len(text) <= MAX_TEXT_CHARS:
            return self.tokenize_bytes(text.encode(), add_special, parse_special)
        else:
            ids = self._tokenize_long(text, parse_special)
        edges = self.tokenize_bytes(b"", add_special)
        n_front = int(self.adds_bos)
        return [*edges[:n_front], *ids, *edges[n_front:]]

    @cached_property
    def _source_tokenizer(self) -> SourceTokenizer | None:
        """`None` for most models: llama.cpp tokenises their texts as the source does."""
        steps, lstrip, rstrip = (
            (self.metadata(key) or "").split() for key in (STEPS, LSTRIP, RSTRIP)
        )
        if not (steps or lstrip or rstrip or self._split):
            return None

        encode: Callable[[str], list[int]] = partial(self._tokenize_long, parse_special=False)
        ids = encode
        if self._split:
            whole: dict[bytes, int] = {}
            if WHOLE_WORDS in steps:
                others = self.control | self.user_defined
                whole = {self.piece(t): t for t in range(self.n_vocab) if t not in others}
            ids = SourceWords(self._split, encode, whole).ids
        added = {self.token_text(t): t for t in self.user_defined}
        special = {self.token_text(t): t for t in self.control | self._tokens_with(_UNKNOWN)}
        return SourceTokenizer(steps, map(int, lstrip), map(int, rstrip), special, added, ids)

    def _tokenize_long(self, text: str, parse_special: bool) -> list[int]:
        """Tokenise a text in parts, with the same result as for the whole text, except where a BPE
        vocabulary meets a word longer than `LONGEST_WORD`.

        A long text is cut before special tokens that llama.cpp finds in it, but never between such
        a token and white space that it strips. An uncut text would be slow: after each special
        token, llama.cpp searches the whole rest again.
        """
        found: list[int] = []
        start = 0
        special = self._control_or_added if parse_special else self._added
        for match in special.finditer(text):
            at = match.start()
            if at - start < MAX_TEXT_CHARS:
                continue
            if not text[at - 1].isspace() or match[0] not in self._lstripping:
                found += self.tokenize_parts(text[start:at], parse_special)
                start = at
        return found + self.tokenize_parts(text[start:], parse_special)

    def tokenize_parts(self, text: str, parse_special: bool) -> list[int]:
        """Tokenise a text, which may contain escaped bytes. To stay whole, its special tokens must
        be within its first `MAX_TEXT_CHARS` or come after white space."""
        is_bpe = self._flat.llama_vocab_type(self.vocab) == _BPE
        parts = [part.encode(errors=ESCAPED) for part in (_bounded(text) if is_bpe else [text])]
        return [t for part in parts for t in self.tokenize_bytes(part, False, parse_special)]

    @cached_property
    def _lstripping(self) -> frozenset[str]:
        """Tokens that strip the white space before them."""
        return frozenset(map(self.token_text, self._tokens_with(_LSTRIP)))

    @cached_property
    def _control_or_added(self) -> re.Pattern[str]:
        return any_of(map(self.token_text, self.control | self.user_defined))

    @cached_property
    def _added(self) -> re.Pattern[str]:
        return any_of(map(self.token_text, self.user_defined))

    def tokenize_bytes(
        self, data: bytes, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Token ids of a short text, which may begin inside a character."""
        size = len(data) + 8
        while True:
            buffer = (ctypes.c_int32 * size)()
            count = self._flat.llama_tokenize(
                self.vocab, data, len(data), buffer, size, add_special, parse_special
            )
            if count >= 0:
                return list(buffer[:count])
            size = -count

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token; those of a control token only with `special`."""
        to_piece, buffer = self._flat.llama_token_to_piece, _ShortPiece()
        while (length := to_piece(self.vocab, token, buffer, len(buffer), 0, special)) < 0:
            buffer = ctypes.create_string_buffer(-length)
        return buffer.raw[:length]

    def words(self) -> Iterator[bytes]:
        """The text of every token in turn, detokenised alone: without the space that a vocabulary
        adds to a text's first word, and with special tokens spelled out."""
        buffer = ctypes.create_string_buffer(_MOST_PIECE_BYTES)
        token, flat = (ctypes.c_int32 * 1)(), self._flat
        for token[0] in range(self.n_vocab):
            length = flat.llama_detokenize(
                self.vocab, token, 1, buffer, _MOST_PIECE_BYTES, False, True
            )
            yield buffer.raw[:length] if length >= 0 else self.piece(token[0], special=True)


def _bounded(text: str) -> Iterator[str]:
    """Cut a text into parts without a word that is longer than `LONGEST_WORD`. Such a word is cut
    where letters or digits end within the last quarter of that length, else at that length.

    Nothing is cut in the first `MAX_TEXT_CHARS`, so special tokens stay whole there.
    """
    start = 0
    while (at := _first_long_word(text, start)) < len(text):
        end = at + LONGEST_WORD
        seams = [seam.start() for seam in _SEAM.finditer(text, end - LONGEST_WORD // 4, end)]
        cut = max(seams, default=end)
        yield text[start:cut]
        start = cut
    yield text[start:]


def _first_long_word(text: str, start: int) -> int:
    """Where the first word that is too long begins; the text's length if there is none."""
    match = _SHORT_WORDS.match(text, start)
    assert match is not None, "the pattern also matches the empty text"
    return match.end()


# --- how it is loaded ------------------------------------------------------------------


class _Params:
    """llama.cpp's parameters of a load, with the arrays and the callback that they point to, which
    must live until llama.cpp frees the model."""

    def __init__(
        self,
        flat: Any,
        options: LoadOptions,
        replaced: Metadata,
        on_progress: Callable[[float], None] | None,
    ) -> None:
        """`replaced`: values that replace the file's metadata."""
        params = self.native = flat.llama_model_default_params()
        # A NULL-terminated list: without it, llama.cpp uses every device that it finds.
        handles = [device.handle for device in options.devices]
        self._devices = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        is_set = len(handles) > 1
        params.split_mode = flat.LLAMA_SPLIT_MODE_LAYER if is_set else flat.LLAMA_SPLIT_MODE_NONE
        params.main_gpu = 0 if handles else -1
        params.n_gpu_layers = -1 if handles else 0
        self._split_by = (ctypes.c_float * flat.llama_max_devices())(*options.layers)
        if is_set:
            params.tensor_split = ctypes.cast(self._split_by, type(params.tensor_split))
        params.load_mode = {
            (False, False): flat.LLAMA_LOAD_MODE_NONE,
            (True, False): flat.LLAMA_LOAD_MODE_MMAP,
            (False, True): flat.LLAMA_LOAD_MODE_MLOCK,
            (True, True): flat.LLAMA_LOAD_MODE_MMAP_MLOCK,
        }[options.mmap, options.mlock]
        params.vocab_only = options.vocab_only
        params.no_alloc = options.no_alloc
        params.load_mtp = options.mtp
        params.use_extra_bufts = options.extra_buffer_types
        self._tensor_overrides = _tensor_overrides(options.tensor_placement)
        params.tensor_buft_overrides = ctypes.cast(self._tensor_overrides, ctypes.c_void_p)
        self._metadata_overrides = _metadata_overrides(flat, replaced)
        params.kv_overrides = self._metadata_overrides

        def progressed(fraction: float, _user_data: Any) -> bool:
            if on_progress is not None:
                on_progress(fraction)
            return True

        self._progress = flat.llama_progress_callback(progressed)
        params.progress_callback = self._progress


def _replaced_metadata(split: str | None, steps: str | None, options: LoadOptions) -> Metadata:
    """Values that replace the file's metadata. They switch off the steps of llama.cpp's tokenizer
    for which the file records that `SourceTokenizer` does them."""
    found: dict[str, int | float | bool | str] = {}
    if split:
        found["tokenizer.ggml.pre"] = NEUTRAL
    if "space-" in (steps or ""):
        found["tokenizer.ggml.add_space_prefix"] = False
    found |= options.metadata
    if options.without_vocabulary is not None:
        architecture, n_tokens = options.without_vocabulary
        found["tokenizer.ggml.model"] = "no_vocab"
        found[f"{architecture}.vocab_size"] = n_tokens
    return found


def _tensor_overrides(placement: Sequence[tuple[str, int]]) -> Any:
    """llama.cpp's array of `{pattern, buffer type}`, terminated by an empty pattern."""

    class Override(ctypes.Structure):
        _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]

    overrides = (Override * (len(placement) + 1))()
    for entry, (pattern, buffer_type) in zip(overrides, placement, strict=False):
        entry.pattern, entry.buffer_type = pattern.encode(), buffer_type
    return overrides


def _metadata_overrides(flat: Any, values: Metadata) -> Any:
    """llama.cpp's array of metadata that replaces the file's, terminated by an empty key."""
    overrides = (flat.llama_model_kv_override * (len(values) + 1))()
    for each, (key, value) in zip(overrides, values.items(), strict=False):
        each.key = key.encode()
        if isinstance(value, bool):
            each.tag, each.value.val_bool = flat.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
        elif isinstance(value, str):
            each.tag, each.value.val_str = flat.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()
        elif isinstance(value, float):
            each.tag, each.value.val_f64 = flat.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
        else:
            each.tag, each.value.val_i64 = flat.LLAMA_KV_OVERRIDE_TYPE_INT, value
    return overrides
