"""Guesses by lookup: what followed a stream's last three tokens before. Engine thread."""

from __future__ import annotations

from worker.engine.sequence import Sequence

N_GRAM = 3


class Lookup:
    """A `Drafter` that knows one stream, by its n-grams; another one starts it anew."""

    first_acceptance = 0.3
    computes = False

    def __init__(self) -> None:
        self._request_id = -1
        self._follows: dict[tuple[int, ...], int] = {}
        """Where the token after an n-gram is, at its last place."""
        self._n_known = 0

    def follow(self, sequence: Sequence) -> bool:
        """Take in all n-grams but the last."""
        if self._request_id != sequence.request_id:
            self._request_id, self._follows, self._n_known = sequence.request_id, {}, 0
        tokens, follows, n = sequence.tokens, self._follows, len(sequence.tokens)
        for end in range(max(self._n_known, N_GRAM), n):
            follows[tuple(tokens[end - N_GRAM : end])] = end
        self._n_known = n
        return True

    def guess(self, sequence: Sequence, most: int) -> list[int]:
        """What comes after the earlier place of the last n-gram."""
        tokens = sequence.tokens
        at = self._follows.get(tuple(tokens[-N_GRAM:]))
        return tokens[at : at + most] if at is not None else []
