"""The maximum of prompt tokens in a step, which depends on the speed of the device."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.limits import prefill_budget
from worker.wire.engine_settings import EngineSettings


def test_a_device_that_was_not_measured_gets_a_micro_batch() -> None:
    assert prefill_budget(EngineSettings(), 0.0) == 512
    assert prefill_budget(EngineSettings(prefill_budget=100), 1e-6) == 100


@given(
    seconds=st.floats(1e-7, 1.0), batch=st.integers(1, 1 << 14), micro_batch=st.integers(1, 1 << 14)
)
def test_a_fast_device_gets_the_micro_batches_of_a_quarter_second(
    seconds: float, batch: int, micro_batch: int
) -> None:
    settings = EngineSettings("cuda", batch=batch, micro_batch=micro_batch)
    piece, found = min(batch, micro_batch), prefill_budget(settings, seconds)
    assert found % piece == 0 and piece <= found <= batch
    assert found == piece or found * seconds <= 0.25
    one_more = found + piece
    assert one_more > batch or one_more * seconds > 0.25 - seconds
