"""Decides how many prompt tokens a step with running streams computes. Engine thread.

The time of a step is that of its decode rows plus that of its prompt tokens. Both are measured, and
the next step gets as many prompt tokens as fit into the target. Plain Python.
"""

from __future__ import annotations

TILE_TOKENS = 64
"""Prompt tokens are allotted in tiles: llama.cpp's attention on a CPU computes this many rows
together (GGML_FA_TILE_Q), and the rows of an incomplete tile take several times as long. A step has
at least one tile, even beyond the target."""
MEASURED_TOKENS = 64
"""A prompt of this many tokens measures well what a token costs. Until there was one, shorter
prompts, whose tokens cost more, are measured instead."""
_ROW_COST = 1.5
"""The expected time of one more decode row, in prompt tokens of a long prompt…"""
_LEAST_ROW_COST = 0.02
"""…and the least, as a share of the nearest step that was measured."""
NEWEST = 0.3
"""Weight of the newest measurement in a running mean."""
FORGOTTEN = 0.03
"""The weight of a newer estimate in a known time that is no longer measured: the time of more rows,
by `forget_beyond`; that of fewer rows, if more rows took less (while all steps have guesses, none
is measured without); and the prices of copies that are too expensive to be made."""


class Pace:
    def __init__(self, target_seconds: float, most: int) -> None:
        """Keep steps below `target_seconds`, with at most `most` prompt tokens."""
        self.target_seconds, self._most = target_seconds, most
        self._decode: dict[int, float] = {}
        """Seconds of a step without prompts, by its number of rows."""
        self._beside: float | None = None
        """Seconds per prompt token in steps with decode rows."""
        self.seconds_per_prompt_token = 0.0
        """Measured in batches of prompts alone, if there were any; 0 before the first prompt."""
        self._n_measured = 1
        """The number of prompt tokens in that measurement."""
        self._owed = 0.0
        """Seconds of encoding that are not yet followed by as many seconds of steps."""

    def measured(self, n_decoding: int, n_prompt: int, seconds: float) -> None:
        """Record the time of a batch of `n_decoding` decode rows and `n_prompt` prompt tokens."""
        self._owed = max(self._owed - seconds, 0.0)
        if not n_prompt:
            known = self._decode.get(n_decoding, seconds)
            self._decode[n_decoding] = known + NEWEST * (seconds - known)
            for n, longer in self._decode.items():
                if n < n_decoding and longer > seconds:  # fewer rows take no longer than more do
                    self._decode[n] = moved(longer, seconds, FORGOTTEN)
            return
        are_enough = n_prompt >= min(self._n_measured, MEASURED_TOKENS)
        if are_enough and not (n_decoding and self.seconds_per_prompt_token):
            self._n_measured = n_prompt
            self.seconds_per_prompt_token = seconds / (n_decoding + n_prompt)
        if n_decoding:
            if n_decoding not in self._decode and self.seconds_per_prompt_token:
                # This many rows never ran alone: their time is what the prompts leave.
                rest = seconds - n_prompt * self.seconds_per_prompt_token
                self._decode[n_decoding] = max(rest, self.decode_seconds(n_decoding), 0.1 * seconds)
            # The decode time comes from other steps; at least a tenth is counted for the prompts.
            taken = max(seconds - self.decode_seconds(n_decoding), seconds / 10) / n_prompt
            known = taken if self._beside is None else self._beside
            self._beside = moved(known, taken, NEWEST)

    def encoded(self, seconds: float) -> None:
        """Record the time that a part of a picture or sound took in the projector, which nothing
        can interrupt."""
        self._owed += seconds

    @property
    def may_encode(self) -> bool:
        """Whether the next part may be encoded beside other work, which gets half of the time."""
        return not self._owed

    @property
    def seconds_per_pass(self) -> float:
        """The time of a pass over all weights, taken from the shortest step; 0 before the first."""
        return min(self._decode.values(), default=0.0)

    def budget(self, n_decoding: int, n_waiting: int = 0) -> int:
        """Prompt tokens for the next step beside `n_decoding` running streams.

        `n_waiting` requests wait behind the first prompt, for a slot or for their own tokens: the
        more there are beside few streams, the longer a step may take.
        """
        cost = self._beside or self.seconds_per_prompt_token
        if not n_decoding or not cost:
            return self._most
        # Small steps cost throughput, and throughput is what helps requests that wait.
        target = self.target_seconds * (1 + n_waiting / n_decoding)
        # If decode rows take most of it, prompts get as much time as they do: streams then run at
        # half of their pace, and no prompt waits forever.
        decode = self.decode_seconds(n_decoding)
        tokens = int(max(target - decode, decode) / cost)
        return min(max(tokens // TILE_TOKENS, 1) * TILE_TOKENS, self._most)

    def decode_seconds(self, n_rows: int) -> float:
        """The time of a step with this many rows and no prompt; 0 before the first.

        It is interpolated between measured numbers of rows; beyond them, each row adds its expected
        time. The second row is the most expensive on a CPU: a single one has kernels of its own.
        """
        known = self._decode
        if n_rows in known or not known:
            return known.get(n_rows, 0.0)
        below = max((n for n in known if n < n_rows), default=0)
        above = min((n for n in known if n > n_rows), default=0)
        if below and above:
            share = (n_rows - below) / (above - below)
            return moved(known[below], known[above], share)
        nearest = below or above
        seconds = known[nearest]
        if nearest == 1:  # until it is measured, the second row counts as a step of its own
            seconds, nearest = 2 * seconds, 2
        return max(self._expected(seconds, n_rows - nearest), 0.0)

    def _expected(self, seconds: float, n_more: int) -> float:
        """The time of a step with `n_more` rows more than one that takes `seconds`."""
        row = max(_ROW_COST * self.seconds_per_prompt_token, _LEAST_ROW_COST * seconds)
        return seconds + row * n_more

    def forget_beyond(self, n_rows: int) -> None:
        """Move the times of more than `n_rows` rows towards what is expected, so that one slow
        moment of the machine is slowly forgotten."""
        first = self.decode_seconds(n_rows)
        for n, seconds in self._decode.items():
            if n > n_rows:
                self._decode[n] = moved(seconds, self._expected(first, n - n_rows), FORGOTTEN)


def moved(mean: float, newest: float, weight: float) -> float:
    """A running mean, moved towards its newest value."""
    return mean + weight * (newest - mean)
