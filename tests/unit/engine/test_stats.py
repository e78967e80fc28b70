"""How often the loop sends its state."""

from __future__ import annotations

from tests.unit.engine.test_loop import CONTEXT, Engine


def test_the_state_is_sent_five_times_a_second_and_when_the_loop_is_idle() -> None:
    engine = Engine()
    engine.submit(1, b"a prompt", max_tokens=CONTEXT)
    sent = {}
    for _ in range(40):
        engine.now += 0.05
        engine.turn()
        if engine.stats is not None:
            sent[engine.stats.steps] = engine.now
    times = list(sent.values())
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert len(gaps) > 5 and all(abs(gap - 0.2) < 0.01 for gap in gaps)
    engine.run()
    engine.check_idle()


def test_after_a_long_step_the_state_is_sent_at_once() -> None:
    engine = Engine()
    engine.submit(1, b"a prompt", max_tokens=CONTEXT)
    for steps in range(1, 8):
        engine.now += 30
        engine.turn()
        assert engine.stats is not None and engine.stats.steps == steps
