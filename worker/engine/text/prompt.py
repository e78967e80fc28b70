"""From a request's prompt to token ids. Intake thread: everything that can be wrong with a
prompt is found here, before the request is queued."""

from __future__ import annotations

from worker.engine.text.chat_template import ChatTemplate
from worker.engine.text.spellings import Spellings
from worker.errors import ContextLengthExceeded, InvalidRequest
from worker.llama.model import Model
from worker.wire.work import ChatPrompt


class PromptBuilder:
    def __init__(
        self,
        vocabulary: Model,
        template: ChatTemplate | None,
        context_length: int,
        *,
        embeds: bool = False,
    ) -> None:
        self._vocabulary, self._template = vocabulary, template
        self._context_length, self._embeds = context_length, embeds

    def build(self, prompt: str | tuple[int, ...] | ChatPrompt) -> list[int]:
        """Token ids of a prompt, with exactly one BOS where the model wants one.

        Raises:
            InvalidRequest: the prompt is empty, has a token id outside of the vocabulary, or is
                a chat that the template refuses.
            ContextLengthExceeded: it has more tokens than a sequence can hold.
        """
        if isinstance(prompt, tuple):
            self.check_ids(prompt, "prompt")
            tokens = list(prompt)
        else:
            tokens = self.tokenize(prompt) if isinstance(prompt, str) else self._chat(prompt)
        if not tokens:
            raise InvalidRequest("prompt: there is nothing to continue from", field="prompt")
        if len(tokens) > self._context_length:
            raise ContextLengthExceeded(
                f"prompt: it has {len(tokens)} tokens, and a request may have "
                f"{self._context_length} here",
                field="prompt",
                prompt_tokens=len(tokens),
                context_length=self._context_length,
            )
        return tokens

    def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text in which special tokens are recognised.

        For a text to be continued BOS is put in front here and not by llama.cpp, which would also
        add it to a text that already begins with it, and EOS behind it for some models.

        Raises:
            InvalidRequest: the text has half of a surrogate pair in it, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"prompt: U+{ord(text[error.start]):04X} in it is half of a surrogate pair and no "
                "character; send the whole character",
                field="prompt",
            ) from None
        if self._embeds:
            return self._vocabulary.tokenize(text, add_special=add_special, parse_special=True)
        tokens = self._vocabulary.tokenize(text, add_special=False, parse_special=True)
        return self._with_bos(tokens) if add_special else tokens

    def _with_bos(self, tokens: list[int]) -> list[int]:
        bos = self._vocabulary.bos
        if self._vocabulary.adds_bos and tokens[:1] != [bos]:
            assert bos is not None
            tokens.insert(0, bos)
        return tokens

    def _chat(self, prompt: ChatPrompt) -> list[int]:
        """Token ids of a chat, whose control tokens are those that the template wrote."""
        tokens = self.tokenize(self.render(prompt))
        model = self._vocabulary
        spellings = Spellings(
            map(model.token_text, model.control.intersection(tokens)),
            map(model.token_text, model.user_defined.intersection(tokens)),
        )
        marked, mark = spellings.marked(prompt)
        if mark is None or len(tokens) > self._context_length:  # too long is too long
            return tokens
        tokens = []
        for part, has_control in spellings.split(self.render(marked), mark):
            tokens += self._vocabulary.tokenize(part, add_special=False, parse_special=has_control)
        return self._with_bos(tokens)

    def render(self, prompt: ChatPrompt) -> str:
        """The text of a chat, by the model's own template."""
        if self._template is None:
            raise InvalidRequest(
                "messages: this model has no chat template; send a prompt to /v1/completions",
                field="messages",
            )
        return self._template.render(prompt)

    def detokenize(self, tokens: tuple[int, ...]) -> str:
        """The text of token ids, special tokens included."""
        self.check_ids(tokens, "tokens")
        pieces = (self._vocabulary.piece(token, special=True) for token in tokens)
        return b"".join(pieces).decode("utf-8", "replace")

    def check_ids(self, tokens: tuple[int, ...], field: str) -> None:
        for token in tokens:
            if not 0 <= token < self._vocabulary.n_vocab:
                raise InvalidRequest(
                    f"{field}: {token} is no token id of this model "
                    f"(0..{self._vocabulary.n_vocab - 1})",
                    field=field,
                )
