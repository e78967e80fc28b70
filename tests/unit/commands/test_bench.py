"""The table of `bench`, and the settings of the worker that it measures."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table

from worker.commands import bench, served
from worker.flags import parse_flags
from worker.settings import FIELDS, Settings, group_of

NOBODY = "http://127.0.0.1:9/ready"


def test_bench_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measured(url: str, settings: Settings, live: Live, table: Table) -> None:
        with live:
            for n in (1, 4, 16):
                result = bench.Result(n, 80.5 * n, 12.4 * n, 5.25, 64 * n, 48 * n)
                table.add_row(*bench._row(result))

    ready = {"model_ref": "tiny-model", "device": "CPU", "seconds": 1}
    served = nullcontext(("http://nobody", ready))
    monkeypatch.setattr(bench, "own_worker", lambda settings, n_slots: served)
    monkeypatch.setattr(bench, "_measure", measured)
    assert bench.run(Settings(), as_json=False) == 0
    table = capsys.readouterr().out
    assert table.endswith("┘\n"), "what is written behind it begins a line"
    heads = ("streams", "tok/s", "first token", "between tokens")
    assert all(head in table for head in heads)
    rows = re.findall(r"^\D+(\d+) \D+([\d.]+) \D+(\d+) ms \D+([\d.]+) ms", table, re.M)
    assert rows == [
        ("1", "80.5", "12", "5.2"),
        ("4", "322.0", "50", "5.2"),
        ("16", "1288.0", "198", "5.2"),
    ]


def test_bench_passes_all_settings_except_those_of_server_and_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting reaches the measured worker, unless it is for the server or the pool."""
    changed = {
        "lora": ("a,b.gguf", "b=b.gguf:2"),
        "samplers": "top_k;min_p",
        "temperature": 0.5,
        "draft": 'b"ü\x7f.gguf',
        "models_file": str(tmp_path / "models.toml"),
        "chat_template": "c.jinja",
        "chat_template_kwargs": '{"a": {"b": [1, "x"]}}',
        "reasoning": "none",
        "reasoning_budget": 7,
        "kv_cells": 4096,
        "mmap": False,
    }
    settings = Settings.load("cpu", {**changed, "callback_url": NOBODY, "port": 9000})
    monkeypatch.setenv("LLORCH_HOST", "192.0.2.1")
    monkeypatch.setenv("MODEL_PATH", "other.gguf")
    kept = served._environment(settings)
    for name in {"LLORCH_HOST", "MODEL_PATH"} - kept.keys():
        monkeypatch.delenv(name)
    passed = Settings.load("cpu", parse_flags("cpu", served._flags(settings, 16)))
    own = {"slots": 16, "port": 0, "host": ("127.0.0.1",), "callback_url": None}
    for name, info in FIELDS.items():
        if group_of(info) not in ("server", "pool") or name in own:
            assert getattr(passed, name) == own.get(name, getattr(settings, name)), name
