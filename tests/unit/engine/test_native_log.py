"""llama.cpp's log: its warnings and errors are logged, except harmless ones."""

from __future__ import annotations

import pytest

from worker.engine import process


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __getattr__(self, level: str) -> object:
        return lambda event, line: self.lines.append((level, line))


@pytest.mark.parametrize(
    ("level", "line", "expected"),
    [
        ("error", "llama_decode: failed to decode, ret = -3", "error"),
        ("error", "llama_decode: failed to decode, ret = 2", "debug"),  # a cancel within a step
        ("error", "process_ubatch: failed to compute graph, compute status: 1", "debug"),
        ("error", "process_ubatch: failed to compute graph, compute status: -1", "error"),
        ("error", "graph_compute: ggml_backend_sched_graph_compute failed with error 1", "debug"),
        ("warning", "decode: removing memory module entries for seq_id = 1", "debug"),
        ("warning", "decode: failed to find a memory slot for batch of size 3", "debug"),
        ("error", "init_batch: failed to prepare attention ubatches", "debug"),
        ("warning", "n_ctx_seq > n_ctx_train: possible training context overflow", "debug"),
        ("warning", "something else", "warning"),
        ("info", "loaded", "debug"),
    ],
)
def test_expected_lines_are_logged_at_debug(
    monkeypatch: pytest.MonkeyPatch, level: str, line: str, expected: str
) -> None:
    log = Log()
    monkeypatch.setattr(process, "log", log)
    process._forward_log(level, line)  # type: ignore[arg-type]
    assert log.lines == [(expected, line)]
