"""The arithmetic behind the table, and the table."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.bench import report
from tests.bench.__main__ import main, parse
from tests.bench.errors import BenchError
from tests.bench.loads import LOADS, read_join, read_throughput
from tests.bench.model import is_whole_text
from tests.bench.stats import medians, paired_ratios, percentile
from tests.bench.streams import TokenStream

WORDS = [f"w{i}" for i in range(100)]


def stream(sent_s: float, *times_s: float) -> TokenStream:
    return TokenStream(sent_s, times_s, "", "length", len(times_s))


def test_percentiles_interpolate_between_ranks() -> None:
    assert percentile([3.0], 95) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)
    with pytest.raises(ValueError):
        percentile([], 50)


def test_ratios_are_taken_within_a_round_before_the_median() -> None:
    ours = {1: {"x": 10.0}, 2: {"x": 30.0}, 3: {"x": 8.0}, 4: {"x": 1.0}}
    theirs = {1: {"x": 5.0}, 2: {"x": 15.0}, 3: {"x": 8.0}}
    assert paired_ratios(ours, theirs) == {"x": 2.0}
    assert medians(list(ours.values())) == {"x": 9.0}


def test_throughput_counts_from_the_first_request_to_the_last_token() -> None:
    prompts = LOADS["streams4"].make(random.Random(1), WORDS)[:2]
    short = [type(prompt)(prompt.text, 3) for prompt in prompts]
    metrics = read_throughput([stream(0.0, 0.5, 0.6, 0.7), stream(0.1, 1.0, 1.5, 2.0)], short)
    assert metrics["output_tokens_per_s"] == pytest.approx(3.0)
    assert metrics["ttft_p50_ms"] == pytest.approx(700)
    assert metrics["itl_p50_ms"] == pytest.approx(300)
    with pytest.raises(BenchError, match="instead of 3"):
        read_throughput([stream(0.0, 0.5), stream(0.0, 0.5)], short)


def test_a_join_is_judged_by_the_gaps_that_reach_into_it() -> None:
    prompts = LOADS["join"].make(random.Random(1), WORDS)
    idle = [i * 0.01 for i in range(65)]
    running = stream(-0.1, *idle, 2.64, 2.65, 2.66)
    joiner = stream(0.64, 2.645, *(2.65 + i / 100 for i in range(15)))
    metrics = read_join([running, joiner], prompts)
    assert metrics["idle_itl_p50_ms"] == pytest.approx(10)
    assert metrics["join_itl_max_ms"] == pytest.approx(2000)
    assert metrics["join_ttft_ms"] == pytest.approx(2005)
    assert metrics["join_tokens_meanwhile"] == 2


def test_prompts_are_repeatable_distinct_and_share_what_they_should() -> None:
    for load in LOADS.values():
        first, second = (load.make(random.Random("seed"), WORDS) for _ in range(2))
        assert first == second
        assert len({prompt.text for prompt in first}) == len(first)
    shared = LOADS["shared"].make(random.Random(1), WORDS)
    counts = {len(prompt.text.split()) for prompt in shared}
    commons = {" ".join(prompt.text.split()[:461]) for prompt in shared}
    assert (counts, len(commons), len(shared)) == ({512}, 1, 16)


def test_the_table_and_the_file_hold_medians_and_ratios(tmp_path: Path) -> None:
    results: report.Results = {
        "streams1": {
            "worker": {1: {"output_tokens_per_s": 110.0}, 2: {"output_tokens_per_s": 90.0}},
            "llama-server": {1: {"output_tokens_per_s": 100.0}, 2: {"output_tokens_per_s": 90.0}},
            "limit": {1: {"output_tokens_per_s": 200.0}, 2: {"output_tokens_per_s": 200.0}},
        }
    }
    summary = report.summarise(results, ["worker", "llama-server"])
    text = report.table(summary)
    assert "| streams1 | output tok/s | 100 | 95.0 | 200 | 1.05 | 0.50 |" in text.splitlines()
    report.write_json(tmp_path / "new" / "figures.json", summary)
    assert json.loads((tmp_path / "new" / "figures.json").read_text()) == summary


def test_figures_taken_on_a_busy_machine_are_called_so() -> None:
    quiet, busy = {"foreign_cpu_share": 0.02}, {"foreign_cpu_share": 0.8}
    results: report.Results = {"join": {"worker": {1: quiet}}, "shared": {"worker": {1: busy}}}
    assert report.disturbed(results) == ["shared (up to 0.80 cores)"]


def test_only_whole_visible_text_may_be_sampled() -> None:
    assert is_whole_text("Ġhello")
    assert is_whole_text("Ã¼")
    assert not is_whole_text("Ã")
    assert not is_whole_text("Ċ")


def test_flags_that_make_no_sense_end_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "vllm"]) == 1
    assert "--only knows no 'vllm'" in capsys.readouterr().err
    assert main(["--rounds", "0"]) == 1
    assert "--rounds is 0" in capsys.readouterr().err
    assert parse(["--only", "limit,worker"]).only == ["worker", "limit"]
