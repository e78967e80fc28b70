"""After the first request, the texts of tokens are looked up while the loop is idle."""

from __future__ import annotations

import threading
import time

from tests.unit.engine.test_loop import Engine


def test_an_idle_loop_looks_up_what_the_steps_will_need() -> None:
    engine = Engine()
    looked_up: set[int] = set()
    piece = engine.backend.piece

    def counted(token: int, shown: tuple[str, ...] = ()) -> bytes:
        looked_up.add(token)
        return piece(token, shown)

    engine.backend.piece = counted  # type: ignore[method-assign]
    engine.submit(1, b"hello", max_tokens=40)
    engine.run()
    assert 0 < len(looked_up) <= 26, "what is sent to the loop comes first"
    idle = threading.Thread(target=engine.loop.run)
    idle.start()
    deadline = time.monotonic() + 30
    while len(looked_up) < 256 and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.loop.stop()
    idle.join()
    assert looked_up == set(range(256)), "all but the one that ends an answer"
    looked_up.clear()
    engine.submit(2, b"another", max_tokens=40)
    engine.run()
    assert engine.text(2)
    assert not looked_up


def test_a_stream_with_stops_looks_each_token_up_once() -> None:
    engine = Engine()
    looked_up: list[int] = []
    piece = engine.backend.piece

    def counted(token: int, shown: tuple[str, ...] = ()) -> bytes:
        looked_up.append(token)
        return piece(token, shown)

    engine.backend.piece = counted  # type: ignore[method-assign]
    engine.submit(1, b"hello", max_tokens=60, stop=("never",))
    engine.run()
    assert len(engine.text(1)) > 26, "some letters came twice"
    assert len(looked_up) == len(set(looked_up))
