"""The shapes that tensors of many families have."""

from __future__ import annotations

from worker.convert.architectures.rules import Dims, Shape


def vector(d: Dims) -> tuple[int, ...]:
    return (d.n_embd,)


def by_token(d: Dims) -> tuple[int, ...]:
    return (d.n_vocab, d.n_embd)


def square(d: Dims) -> tuple[int, ...]:
    return (d.n_embd, d.n_embd)


def three_squares(d: Dims) -> tuple[int, ...]:
    """Three projections that are stored as one, such as q, k and v."""
    return (3 * d.n_embd, d.n_embd)


def up(d: Dims) -> tuple[int, ...]:
    return (d.n_ff, d.n_embd)


def gate_and_up(d: Dims) -> tuple[int, ...]:
    return (2 * d.n_ff, d.n_embd)


def down(d: Dims) -> tuple[int, ...]:
    return (d.n_embd, d.n_ff)


def rows_of(shape: Shape) -> Shape:
    """The shape of the bias of a weight."""
    return lambda d: shape(d)[:1]
