"""Constrains an answer token by token: llguidance over the model's own vocabulary.

A grammar is compiled on the intake thread; from then on, only the engine thread uses it. llguidance
is written in Rust: it releases the GIL and reports faults without exceptions, so none can end the
process. It enforces `pattern`, `format`, bounds of floats and intersections, which llama.cpp's
grammars cannot express.

A mask is computed only if the drawn token is refused: checking a single token takes a few
microseconds. With 16 sequences of a model that follows its schema, there is less than one mask per
step, so masks need no pool of threads.
"""

from __future__ import annotations

import ctypes
import re
import threading
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from worker.errors import InvalidRequest
from worker.llama import library
from worker.llama.model import ESCAPED, MAX_TEXT_CHARS, Model
from worker.llama.reasoning import ReasoningTrack
from worker.wire.sampling import Constraint

_COMPILER_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "max_grammar_size": 20_000,
    "max_items_in_row": 2_000,
    "precompute_large_lexemes": False,  # slow, and only makes masks faster
    "verbose_errors": False,
}
"""Within these limits, a grammar compiles in less than 100 ms or is refused. The time of a mask
grows with the square of the items in a row: 2,000 are enough for 1,000 choices or 400 optional
properties, and keep it below 50 ms."""

_ECHO = re.compile(r"\n +\d+ \| |NoExtensionBias")
"""Where an error of llguidance starts to quote the grammar, which the client did not write, or says
in llguidance's own terms that no text follows."""


_TOKENIZE = ctypes.CFUNCTYPE(
    *(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32),
    *(ctypes.POINTER(ctypes.c_int32), ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
)
"""The prototype of `llama_tokenize`."""


def _tokenize(
    model: Model, vocab: int, data: int, size: int, ids: Any, most: int, add: bool, parse: bool
) -> int:
    """The `llama_tokenize` that llguidance calls for forced text; a long text is tokenised in parts
    (`Model.tokenize_parts`)."""
    if size <= MAX_TEXT_CHARS:
        text = ctypes.cast(data, ctypes.c_char_p)
        return int(library.load().llama_tokenize(vocab, text, size, ids, most, add, parse))
    found = model.tokenize_parts(ctypes.string_at(data, size).decode(errors=ESCAPED), parse)
    if len(found) > most:
        return -len(found)
    for at, token in enumerate(found):
        ids[at] = token
    return len(found)


class GrammarVocabulary:
    """A model's vocabulary in llguidance's form.

    It is built for the first constraint, because it costs time and memory.
    """

    def __init__(self, model: Model) -> None:
        self._model, self._lock = model, threading.Lock()
        self._tokenizer: Any = None
        self._tokenize = _TOKENIZE(partial(_tokenize, model))

    def tokenizer(self) -> Any:
        """Raises `InvalidRequest` if llguidance lacks tokens in this vocabulary (WordPiece)."""
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._build()
                except ValueError as error:
                    raise InvalidRequest(
                        f"answers cannot be constrained with this model's vocabulary: {error}"
                    ) from error
            return self._tokenizer

    def _build(self) -> Any:
        # Not `llguidance.llamacpp`: its helper reads the attributes by a deprecated name.
        from llguidance import LLTokenizer

        model = self._model
        tokens = []
        for token in range(model.n_vocab):
            piece = model.piece(token, special=True)
            is_mark = piece.startswith(b"<") and piece.endswith(b">")
            if token in model.control or (is_mark and token in model.user_defined):
                piece = b"\xff" + piece  # a special token, which no text of a grammar matches
            tokens.append(piece)
        build: Any = LLTokenizer.from_llamacpp  # type: ignore[attr-defined]
        return build(
            tokens=tokens,
            vocab_ptr=model.vocab,
            tokenize_fptr=ctypes.cast(self._tokenize, ctypes.c_void_p).value,
            eos_token=sorted(model.eog),
            slices=None,
        )

    def follow(self, constraint: Constraint, reasoning: ReasoningTrack | None = None) -> Follower:
        """Start to follow a constraint, after the block of reasoning if one is open.

        Raises `InvalidRequest` if the constraint cannot be compiled, or allows no answer.
        """
        matcher = compile_grammar(self.tokenizer(), constraint.grammar, constraint.field)
        return Follower(matcher, self._model, constraint.field, reasoning)


def compile_grammar(tokenizer: Any, grammar: str, field: str) -> Any:
    """llguidance's matcher for a Lark grammar.

    Raises `InvalidRequest` if the grammar is invalid, too large, or matches no text.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**_COMPILER_LIMITS)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error() and _begins(matcher):
        return matcher
    reason = " ".join(_ECHO.split(matcher.get_error())[0].split())[:300] or "no text follows it"
    raise InvalidRequest(f"{field} cannot be enforced: {reason}", field=field)


def _begins(matcher: Any) -> bool:
    """Whether the grammar allows a first token.

    It does not if it never ends (`root ::= root`) or is too ambiguous.
    """
    allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    if matcher.is_error() or not allowed.any():
        return False
    if matcher.is_accepting():
        return True
    byte = int(np.flatnonzero(allowed)[0])
    token = 8 * byte + int(np.unpackbits(allowed[byte : byte + 1], bitorder="little").argmax())
    trial = matcher.deep_copy()
    return bool(trial.consume_token(token)) and not trial.is_error()


class Follower:
    """The state of a constraint at one point of an answer.

    The state follows from the grammar, the prompt and the tokens since. To continue in another
    engine, follow the constraint again and `take` those tokens.

    While `reasoning` has an open block, the answer is free, but may not end.
    """

    def __init__(
        self, matcher: Any, model: Model, field: str, reasoning: ReasoningTrack | None
    ) -> None:
        self._matcher, self._model, self._reasoning = matcher, model, reasoning
        self.field = field
        """The request's field that the constraint comes from, for errors."""

    def copy(self) -> Follower:
        """An independent copy of the state after the reasoning. It takes microseconds."""
        return Follower(self._matcher.deep_copy(), self._model, self.field, None)

    @property
    def is_waiting(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_open

    def take(self, token: int) -> bool:
        """Advance by one token; returns false, without a change, if the token is not allowed."""
        if self._reasoning is not None and self._reasoning.is_open:
            return self._reasoning.admits(token)
        if token in self._model.eog:
            return bool(self._matcher.is_accepting())
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def forced(self) -> list[int]:
        """The tokens of the only text that can follow, split as by the tokenizer. The end of that
        text is left to the model if a longer token could begin with it."""
        if self.is_waiting:
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens if self._model.eog.isdisjoint(tokens) else []

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """For each token, whether it may come next.

        Raises `InvalidRequest` if the grammar has become too complex at this point of the text.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())[:200]
            raise InvalidRequest.of_field(self.field, f"cannot be followed any further: {reason}")
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        allowed = bits[:vocab_size].view(np.bool_)
        if len(allowed) == vocab_size:
            return allowed
        return np.pad(allowed, (0, vocab_size - len(allowed)))  # the rest of the logits is padding
