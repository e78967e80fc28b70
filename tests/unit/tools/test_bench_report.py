"""The arithmetic behind the table, and the table."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.bench import agents, chart, report
from tools.bench.__main__ import main, parse
from tools.bench.client import Recording
from tools.bench.errors import BenchError
from tools.bench.loads import (
    LOADS,
    Prompt,
    open_load,
    read_join,
    read_steady,
    read_stranger,
    read_throughput,
)
from tools.bench.model import is_whole_text
from tools.bench.stats import medians, paired_errors, paired_ratios, percentile
from tools.bench.streams import TokenStream

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
    own = {1: {"x": 10.0}, 2: {"x": 30.0}, 3: {"x": 8.0}, 4: {"x": 1.0}}
    peers = {1: {"x": 5.0}, 2: {"x": 15.0}, 3: {"x": 8.0}}
    assert paired_ratios(own, peers) == {"x": 2.0}
    assert medians(list(own.values())) == {"x": 9.0}


def test_the_chart_shows_where_the_worker_is_behind(tmp_path: Path) -> None:
    own = {"output_tokens_per_s": 80.0, "ttft_p50_ms": 50.0}
    peers = {"output_tokens_per_s": 100.0, "ttft_p50_ms": 100.0}
    results: report.Results = {"streams1": {"worker": {1: own}, "llama-server": {1: peers}}}
    summary = report.summarise(results, ["worker", "llama-server"])
    assert [row.ratio for row in chart.rows_of(summary)] == [0.8, 2.0]
    chart.draw(tmp_path / "speed.svg", summary)
    picture = ElementTree.parse(tmp_path / "speed.svg").getroot()
    kinds = [bar.get("class") for bar in picture.iter("{http://www.w3.org/2000/svg}rect")]
    widths = [
        float(bar.attrib["width"]) for bar in picture.iter("{http://www.w3.org/2000/svg}rect")
    ]
    assert kinds == ["behind", "ahead"]
    assert widths[1] / widths[0] == pytest.approx(2.5, rel=0.01)


def test_a_ratio_has_an_error_from_four_pairs_on() -> None:
    own = {n: {"x": 10.0 * 1.1 ** (n % 2)} for n in range(4)}
    peers = {n: {"x": 10.0} for n in range(4)}
    # Two values, each twice: their deviation is half the distance times the root of 4 / 3.
    expected = math.log(1.1) / 2 * math.sqrt(4 / 3) / math.sqrt(4)
    assert paired_errors(own, peers)["x"] == pytest.approx(expected)
    assert paired_errors(own, {n: peers[n] for n in range(3)}) == {}


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


def test_only_the_stranger_after_the_conversations_is_measured() -> None:
    prompts = LOADS["stranger"].make(random.Random(1), WORDS)
    assert [prompt.start_after for prompt in prompts] == [None, *((n, 1) for n in range(8))]
    before, last = stream(0.0, 3.0, 4.0), stream(4.0, *(4.5 + i / 100 for i in range(64)))
    metrics = read_stranger([before] * 8 + [last], prompts)
    assert metrics["ttft_p50_ms"] == pytest.approx(500)
    assert metrics["itl_p50_ms"] == pytest.approx(10)


def test_prompts_are_repeatable_distinct_and_share_what_they_should() -> None:
    for load in LOADS.values():
        first, second = (load.make(random.Random("seed"), WORDS) for _ in range(2))
        assert first == second
        assert len({prompt.text for prompt in first}) == len(first)
    shared = LOADS["shared"].make(random.Random(1), WORDS)
    counts = {len(prompt.text.split()) for prompt in shared}
    commons = {" ".join(prompt.text.split()[:461]) for prompt in shared}
    assert (counts, len(commons), len(shared)) == ({512}, 1, 16)


def test_steady_is_counted_while_all_streams_run() -> None:
    prompts = [Prompt("a", 4), Prompt("b", 4)]
    streams = [stream(0.0, 1.0, 2.0, 3.0, 4.0), stream(0.0, 2.5, 3.0, 3.5, 5.0)]
    # From 2.5 to 4.0: two tokens of each.
    assert read_steady(streams, prompts)["steady_tokens_per_s"] == pytest.approx(4 / 1.5)
    with pytest.raises(BenchError, match="never all ran at the same time"):
        read_steady([stream(0.0, 1.0, 2.0), stream(0.0, 3.0, 4.0)], prompts)


def test_open_arrivals_come_at_their_rate_and_a_third_begin_alike() -> None:
    prompts = open_load(80, 3000, 5.0).make(random.Random(1), WORDS)
    lengths = sorted(len(prompt.text.split()) for prompt in prompts)
    assert (lengths[0] >= 20, lengths[-1] <= 1200) == (True, True)
    assert 140 <= lengths[1500] <= 170  # the middle of a log-uniform range: sqrt(20 * 1200) = 155
    assert prompts[-1].at_s / 3000 == pytest.approx(1 / 4.0, rel=0.1)
    beginnings = Counter(" ".join(prompt.text.split()[:19]) for prompt in prompts)
    assert beginnings.most_common(1)[0][1] / 3000 == pytest.approx(1 / 3, abs=0.03)
    assert {prompt.n_out for prompt in prompts} == set(range(16, 201))


def test_a_turn_repeats_the_conversation_before_it() -> None:
    talk = agents.Talk(8, n_long_words=500)
    prompts = talk.make(random.Random(1), WORDS)
    requests = talk.requests_of(prompts, "m", {})
    assert [request.after_end for request in requests[:12]] == [None, *range(9), None, 10]
    answer = b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices":[{"delta":{"content":"Yes."}}]}\n\n'
    body = requests[1].body
    assert callable(body)
    messages = body([Recording(0.0, [(1.0, answer)])])["messages"]
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user"]
    assert (messages[1]["content"], messages[2]["content"]) == (prompts[0].text, "Yes.")
    alone = requests[-1].body
    assert callable(alone) and (requests[-1].at_s, requests[-1].after_end) == (10.0, None)
    assert [len(each["content"].split()) for each in alone([])["messages"]] == [8, 500]


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


def test_variants_are_compared_with_the_worker_if_there_is_no_peer() -> None:
    results: report.Results = {
        "guessed1": {
            name: {n: {"output_tokens_per_s": speed} for n in range(4)}
            for name, speed in (("worker", 100.0), ("draft", 120.0))
        }
    }
    text = report.table(report.summarise(results, ["worker", "draft"]))
    assert text.splitlines()[0].endswith("| worker | draft | draft / worker |")
    assert text.splitlines()[2].endswith("| 100 | 120 | 1.20 ± 0.000 |")


def test_figures_taken_on_a_busy_machine_are_marked() -> None:
    quiet, busy = {"foreign_cpu_share": 0.02}, {"foreign_cpu_share": 0.8}
    results: report.Results = {"join": {"worker": {1: quiet}}, "shared": {"worker": {1: busy}}}
    assert report.disturbed(results) == ["shared (up to 0.80 cores)"]


def test_only_whole_visible_text_may_be_sampled() -> None:
    assert is_whole_text("Ġhello")
    assert is_whole_text("Ã¼")
    assert not is_whole_text("Ã")
    assert not is_whole_text("Ċ")


def test_invalid_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "vllm"]) == 1
    assert "--only does not know 'vllm'" in capsys.readouterr().err
    assert main(["--rounds", "0"]) == 1
    assert "--rounds is 0" in capsys.readouterr().err
    assert main(["--only", "worker", "--chart", "speed.svg"]) == 1
    assert "--chart compares worker and llama-server" in capsys.readouterr().err
    assert main(["--before", "/nowhere"]) == 1
    assert "it is not a checkout of the worker" in capsys.readouterr().err
    assert parse(["--only", "limit,worker"]).only == ["worker", "limit"]
