"""The text of a token is looked up once."""

from __future__ import annotations

from tests.unit.engine.test_loop import Engine


def test_a_stream_with_stops_looks_each_token_up_once() -> None:
    engine = Engine()
    looked_up: list[int] = []
    piece = engine.runner.piece

    def counted(token: int, shown: tuple[str, ...] = ()) -> bytes:
        looked_up.append(token)
        return piece(token, shown)

    engine.runner.piece = counted  # type: ignore[method-assign]
    engine.submit(1, b"hello", max_tokens=60, stop=("never",))
    engine.run()
    assert len(engine.text(1)) > 26, "some letters came twice"
    assert len(looked_up) == len(set(looked_up))
