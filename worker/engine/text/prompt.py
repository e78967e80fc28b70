"""Turns a request's prompt into token ids.

Intake threads: every fault of a prompt is found here, before the request is queued.
"""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import count, repeat
from typing import Any

from msgspec import structs

from worker.engine.media.reader import DoesNotFit, MediaReader
from worker.engine.media.span import PromptTokens, always_wanted
from worker.engine.text.chat_template import ChatTemplate, Reading
from worker.engine.text.spellings import Spellings
from worker.engine.tokens import common_length
from worker.errors import ContextLengthExceeded, InvalidRequest
from worker.llama.model import Model
from worker.wire.work import (
    MEDIA_MARKER,
    ChatPrompt,
    InfillPrompt,
    MarkedPrompt,
    Medium,
    MixedTokens,
    Prompt,
    Tokenize,
    Tokenized,
)

_MARKER = re.compile(f"{re.escape(MEDIA_MARKER)}()")
_MOST_COUNTED = 65_536
"""The limit of media tokens in a prompt that is only counted, if the context is shorter. Each of 64
pictures may have 1,024, and half an hour of sound has 45,000; preparing them takes seconds."""
_FIRST_WORDS = "\ue000\ue001"
"""Replaces the text of a chat's first user message, to find where it begins."""


class PromptBuilder:
    def __init__(
        self,
        vocabulary: Model,
        template: ChatTemplate | None,
        context_length: int,
        *,
        embeds: bool = False,
        media: MediaReader | None = None,
    ) -> None:
        """`media` reads pictures and sounds, if the model is served with a projector."""
        self._vocabulary, self._template = vocabulary, template
        self._context_length, self._embeds = context_length, embeds
        self._media = media

    def build(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt without media; otherwise as `read`."""
        return self.read(prompt).ids

    def read(
        self,
        prompt: Prompt,
        check_wanted: Callable[[], None] = always_wanted,
        cache_salt: str | None = None,
        field: str = "prompt",
    ) -> PromptTokens:
        """Token ids of a prompt, with exactly one BOS if the model wants one.

        `check_wanted` is called before each medium; an error that it raises is passed on. Media
        that requests with the same `cache_salt` hold are not decoded again. `field` is the
        request's field of a text or ids, for errors.

        Raises:
            InvalidRequest: the prompt is empty, has an invalid token id, is a chat that the
                template refuses, or has a medium that cannot be read.
            ContextLengthExceeded: it has more tokens than a sequence can hold.
        """
        tokens = self._read_all(prompt, PromptTokens(False, check_wanted, cache_salt), field)
        field = getattr(prompt, "field", field)
        if not tokens.ids:
            raise InvalidRequest.of_field(field, "there is nothing to continue from")
        self._fitting(tokens.ids, field)
        return tokens

    def count(self, prompt: Prompt, check_wanted: Callable[[], None] = always_wanted) -> int:
        """The number of a prompt's tokens, even if there are too many; otherwise as `read`.

        Its media may have `_MOST_COUNTED` tokens even if the context is shorter; none is held.
        """
        return len(self._read_all(prompt, PromptTokens(True, check_wanted)).ids)

    def _read_all(self, prompt: Prompt, found: PromptTokens, field: str = "prompt") -> PromptTokens:
        """Fill `found` with a prompt's token ids and media, and return it."""
        match prompt:
            case str() | tuple():
                found.ids = self._ids(prompt, field)
            case InfillPrompt():
                found.ids = self._infill(prompt)
            case MarkedPrompt(text, media, own_field):
                self._add_all(found, [(text, True)], _MARKER, media, own_field)
            case ChatPrompt():
                self._add_chat(found, prompt)
        return found

    def _fitting(self, tokens: list[int], field: str) -> list[int]:
        if len(tokens) > self._context_length:
            raise self._exceeded(len(tokens), field, f"{len(tokens)} tokens")
        return tokens

    def _exceeded(self, n_tokens: int, field: str, what: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"{field}: it has {what}, and the context has room for {self._context_length}",
            field=field,
            prompt_tokens=n_tokens,
            context_length=self._context_length,
        )

    def _ids(
        self,
        content: str | MixedTokens,
        field: str,
        *,
        add_special: bool = True,
        parse_special: bool = True,
    ) -> list[int]:
        """Token ids of a text, or of a list that mixes ids and texts. With `add_special`, BOS is
        added to a text that comes first."""
        parts = (content,) if isinstance(content, str) else content
        self._check_ids(parts, field)
        found: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, str):
                adds = add_special and index == 0
                found += self.tokenize(part, add_special=adds, parse_special=parse_special)
            else:
                found.append(part)
        return found

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text; with `parse_special`, special tokens are recognised in it.

        For a text to be continued, BOS is added here. llama.cpp would add it even to a text that
        already begins with it, and for some models it would append EOS.
        """
        tokenize = partial(self._vocabulary.tokenize, text, parse_special=parse_special)
        if self._embeds:
            return tokenize(add_special=add_special)
        tokens = tokenize(add_special=False)
        return self._with_bos(tokens) if add_special else tokens

    def embedded(self, text: str | MixedTokens, field: str) -> list[int]:
        """Token ids of a text to embed; `field` is its place in the request.

        Raises:
            InvalidRequest: it has an invalid token id.
            ContextLengthExceeded: it is too long.
        """
        # An empty text becomes one token, to keep its place among others.
        return self._fitting(self._ids(text, field) or [self._vocabulary.bos or 0], field)

    def pair(self, query: str, document: str, field: str) -> list[int]:
        """Token ids of a query and a document for a model that ranks: in the model's own template,
        else with the vocabulary's separators. `field` is the document's place in the request.

        Raises:
            ContextLengthExceeded: both together are too long.
        """
        tokens = self._paired(query, document)
        if len(tokens) > self._context_length < len(self._paired(query, "")):
            field = "query"
        return self._fitting(tokens, field)

    def _paired(self, query: str, document: str) -> list[int]:
        model = self._vocabulary
        template = model.chat_template("rerank")
        if template is not None:
            values = {"{query}": query, "{document}": document}
            parts = re.split(r"(\{query\}|\{document\})", template)
            texts = [(values.get(part, part), part not in values) for part in parts]
            if not any(s in query or s in document for s in self._control_texts):
                # A word may begin in the template and end in the query or document.
                texts = [("".join(text for text, _ in texts), True)]
            tokens: list[int] = []
            for text, has_control in texts:
                tokens += model.tokenize(text, add_special=False, parse_special=has_control)
            return self._with_bos(tokens)
        ends = model.pair_ends
        return self._with_bos([*self._plain(query), *ends, *self._plain(document), *ends[:1]])

    def _plain(self, text: str) -> list[int]:
        """Token ids of a text in which special tokens are not recognised, without BOS."""
        return self._vocabulary.tokenize(text, add_special=False, parse_special=False)

    @cached_property
    def _control_texts(self) -> tuple[str, ...]:
        return tuple(map(self._vocabulary.token_text, self._vocabulary.control))

    def tokenized(self, work: Tokenize) -> Tokenized:
        tokens = self._ids(
            work.text, "content", add_special=work.add_special, parse_special=work.parse_special
        )
        ids = array("i", tokens).tobytes()
        if not work.with_pieces:
            return Tokenized(ids)
        pieces = [self._vocabulary.piece(token, special=True) for token in tokens]
        return Tokenized(ids, array("i", map(len, pieces)).tobytes(), b"".join(pieces))

    def _with_bos(self, tokens: list[int]) -> list[int]:
        bos = self._vocabulary.bos
        if self._vocabulary.adds_bos and tokens[:1] != [bos]:
            assert bos is not None
            tokens.insert(0, bos)
        return tokens

    def _infill(self, prompt: InfillPrompt) -> list[int]:
        """Token ids of a text with a gap, in the format that models for code are trained on.

        Other files come first, each under its name. Special tokens are not recognised in the texts.
        """
        tokens = self._vocabulary.infill
        if tokens is None:
            raise InvalidRequest.of_field(
                prompt.fields[1],
                "this model has no fill-in-the-middle tokens; send what comes before the gap "
                "alone, as the prompt of a completion",
            )
        plain = self._plain
        parts: list[int] = []
        if prompt.files and tokens.file is not None:
            if tokens.repository is not None:
                parts += [tokens.repository, *plain("project\n")]
            for name, text in prompt.files:
                parts += [tokens.file, *plain(f"{name}\n{text}")]
            parts += [tokens.file, *plain("current\n")]
        else:
            for name, text in prompt.files:
                parts += plain(f"--- {name} ---\n{text}\n")
        parts += [tokens.prefix, *plain(prompt.prefix)]
        parts += [tokens.suffix, *plain(prompt.suffix), tokens.middle]
        return self._with_bos(parts)

    def _add_chat(self, found: PromptTokens, prompt: ChatPrompt) -> None:
        """Add the token ids of a chat; only control tokens that the template wrote are
        recognised."""
        # No message has it, and no template changes it.
        mark = f"medium{secrets.token_hex(12)}"
        reading = self._read(prompt, (f"{mark}x{number}x" for number in count()))
        text = reading.text()
        tokens = self.tokenize(text)
        parts = self._parts(reading, tokens)
        if parts is None:
            if not prompt.media:
                found.ids = tokens
                return
            parts = [(text, True)]
        # A template may write messages in another order than they came.
        numbered = re.compile(rf"{mark}x(\d+)x")
        self._add_all(found, parts, numbered, prompt.media, prompt.field)

    def _parts(self, reading: Reading, tokens: list[int]) -> Iterable[tuple[str, bool]] | None:
        """The parts of a chat's text, each with whether control tokens are recognised in it: those
        that messages spell stay text. `None` if they spell none. `tokens` are the whole text's."""
        prompt, model = reading.prompt, self._vocabulary
        # A longer text is refused anyway; with media, some of its tokens are those of marks.
        if len(tokens) > self._context_length and not prompt.media:
            return None
        spellings = Spellings(
            map(model.token_text, model.control.intersection(tokens)),
            map(model.token_text, model.user_defined.intersection(tokens)),
        )
        marking = spellings.marking(reading.chat, prompt.field, lambda: reading.template.deletions)
        if marking is None:
            return None
        chat, mark = marking
        return spellings.split(replace(reading, chat=chat).text(), mark)

    def _add_all(
        self,
        prompt: PromptTokens,
        parts: Iterable[tuple[str, bool]],
        mark: re.Pattern[str],
        media: tuple[Medium, ...],
        field: str,
    ) -> None:
        """Add the ids of a text in parts, each with whether control tokens are recognised in it.
        Each mark is replaced by the medium whose number is its group, or by the next one if the
        group is empty."""
        left = dict(enumerate(media))
        for part, has_control in parts:
            pieces = mark.split(part)
            for number, text in zip([None, *pieces[1::2]], pieces[::2], strict=True):
                if number is not None:
                    medium = left.pop(int(number or len(media) - len(left)), None)
                    if medium is None:
                        why = f"it has more media marks than media ({len(media)})"
                        raise InvalidRequest.of_field(field, why)
                    self._with_bos(prompt.ids)
                    self._read_medium(medium, prompt)
                prompt.ids += self._vocabulary.tokenize(
                    text, add_special=False, parse_special=has_control
                )
        for medium in left.values():
            raise InvalidRequest.of_field(medium.field, "the prompt has no place for it")
        self._with_bos(prompt.ids)

    def _read_medium(self, medium: Medium, prompt: PromptTokens) -> None:
        assert self._media is not None, "the API process refuses it"
        # A small file may be a large picture or a long sound: no more than fits is prepared.
        before, most = len(prompt.ids), self._context_length
        if prompt.is_counted:
            before, most = sum([each < 0 for each in prompt.ids]), max(most, _MOST_COUNTED)
        try:
            self._media.read(medium, prompt, most - before)
        except DoesNotFit as error:
            n_tokens, field = before + error.n_tokens, medium.field
            if prompt.is_counted:
                raise InvalidRequest.of_field(
                    field,
                    "with what precedes it, the request's pictures and sounds have at least "
                    f"{n_tokens} tokens, and at most {most} of them are counted",
                ) from None
            raise self._exceeded(
                n_tokens, field, f"at least {n_tokens} tokens with all that precedes it"
            ) from None

    def system_tokens(self, prompt: Prompt, tokens: list[int]) -> int:
        """How many of a chat's `tokens` precede its user's first words; 0 if that is unknown. Other
        chats are likely to begin with these tokens."""
        if not isinstance(prompt, ChatPrompt):
            return 0
        messages = list(prompt.messages)
        roles = [message.get("role") for message in messages]
        if "user" not in roles:
            return 0
        first = roles.index("user")
        until = [*messages[:first], {**messages[first], "content": _FIRST_WORDS}]
        try:
            text = self.render(
                structs.replace(prompt, messages=tuple(until), continue_final_message=False)
            )
        except InvalidRequest:
            return 0  # the template wants other content, or more messages
        before, found, _ = text.partition(_FIRST_WORDS)
        return common_length(tokens, self.tokenize(before)) if found else 0

    def render(self, prompt: ChatPrompt) -> str:
        """The text of a chat, by the model's own template."""
        return self._read(prompt, repeat(MEDIA_MARKER)).text()

    def _read(self, prompt: ChatPrompt, marks: Iterator[str]) -> Reading:
        if self._template is None:
            why = "this model has no chat template; send a prompt to /v1/completions"
            raise InvalidRequest.of_field(prompt.field, why)
        if prompt.media:
            messages = (
                {
                    **message,
                    "content": _with_media_marked(message.get("content"), marks),
                }
                for message in prompt.messages
            )
            prompt = structs.replace(prompt, messages=tuple(messages))
        return self._template.read(prompt)

    def detokenize(self, tokens: MixedTokens) -> str:
        """The text of token ids, special tokens included, and of the texts among them."""
        self._check_ids(tokens, "tokens")
        pieces = (
            each.encode("utf-8", "replace")
            if isinstance(each, str)
            else self._vocabulary.piece(each, special=True)
            for each in tokens
        )
        return b"".join(pieces).decode("utf-8", "replace")

    def _check_ids(self, tokens: MixedTokens, field: str) -> None:
        n_vocab = self._vocabulary.n_vocab
        for token in tokens:
            if not isinstance(token, str) and not 0 <= token < n_vocab:
                why = f"{token} is not a token id of this model (0..{n_vocab - 1})"
                raise InvalidRequest.of_field(field, why)


def _with_media_marked(content: Any, marks: Iterator[str]) -> Any:
    """A content with media as a text, with the next mark in place of each medium. Parts are joined
    as in llama.cpp's server: by a line break between texts, and by nothing beside a medium."""
    if content is None or isinstance(content, str) or not any(map(_is_medium, content)):
        return content
    text, is_text_before = "", False
    for part in content:
        if _is_medium(part):
            text, is_text_before = text + next(marks), False
        else:
            text += "\n" * is_text_before + str(part.get("text") or "")
            is_text_before = bool(text)
    return text


def _is_medium(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image", "audio")
