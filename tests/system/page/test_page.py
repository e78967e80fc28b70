"""The status page from a user's view: a real worker, a real browser. Needs Chromium and the chat
page; `make page-test`."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartWorker
from tests.support.worker import WorkerProcess, environment, installed
from tests.system.page.keyboard import is_focus_seen, tab_to
from tests.system.page.watching import expect, faults_of, hide, own_hosts, violations

pytestmark = pytest.mark.long
FOX = "Once upon a time, there was a brave fox named"
TIERS = {"device": "found in KV cells", "memory": "found in memory", "disk": "found on disk"}


def tile(page: Any, name: str) -> Any:
    return page.locator("#tiles .card", has_text=name).locator("dd")


def legend(page: Any, id: str) -> dict[str, str]:
    """Return the entries of a legend: the text before the last number, and the number."""
    entries = page.locator(f"#{id} li").all_inner_texts()
    found = [re.fullmatch(r"(.*?) ([\d.,]+(?: [KMGT]?i?B)?)", entry) for entry in entries]
    return {match[1]: match[2] for match in found if match is not None}


def test_facts_are_those_of_info(page: Any, worker: WorkerProcess) -> None:
    expect(page.locator("#state .dot")).to_have_class("dot ready")
    info = worker.get("/info").json()
    facts = page.inner_text("#facts")
    assert info["model"]["name"] in facts and info["engine"]["threads_derivation"] in facts
    assert page.locator("#buffers tr").count() == len(info["residency"]["buffers"])
    expect(page.locator("#restarts-text")).to_contain_text("None")


def test_what_doctor_finds_is_there_too(page: Any, worker: WorkerProcess, tmp_path: Path) -> None:
    command = [*installed(), "doctor", "--slots", "64", "--port", "0", "--json"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, check=True)
    checks = {each["name"]: each["text"] for each in json.loads(done.stdout)["checks"]}
    facts = page.locator("#facts")
    for name in ("machine", "threads", "confined"):
        expect(facts).to_contain_text(f"{name}\n{checks[name]}", use_inner_text=True)
    expect(facts.locator("dt", has_text="memory")).to_be_visible()


def test_numbers_are_those_of_the_metrics(page: Any, worker: WorkerProcess) -> None:
    """While nothing runs, each number of the page is in `/metrics` or computed from them."""
    conversation = " ".join([FOX] * 8)
    for more in ("", " and a cat", " and a cat and a dog"):
        worker.execute(conversation + more, max_tokens=4)
    worker.wait_idle()
    value = worker.metric
    worker.wait_for_free_cells()
    page.reload()
    expect(page.locator("#facts dd").first).to_be_attached()
    assert tile(page, "waiting").inner_text() == f"{value('worker_queue_depth'):.0f}"
    slots = worker.get("/info").json()["engine"]["slots"]
    running = f"{value('worker_requests_running'):.0f} of {slots} slots"
    assert tile(page, "running").inner_text() == running
    written = f"{value('worker_tokens_generated_total'):,.0f}"
    assert tile(page, "tokens written").inner_text() == written
    reused, queried = value("worker_tokens_cached_total"), value("vllm:prefix_cache_queries_total")
    assert reused > 0
    share = tile(page, "prompt tokens reused").inner_text()
    assert float(share.removesuffix(" %")) == pytest.approx(100 * reused / queried, abs=0.51)
    cache = {name: float(n.replace(",", "")) for name, n in legend(page, "cache-legend").items()}
    for tier, name in TIERS.items():
        assert cache[name] == value(f'worker_tokens_reused_total{{tier="{tier}"}}')
    assert cache["computed"] == queried - reused and sum(cache.values()) == queried


def test_the_memory_map_adds_up_and_is_to_scale(page: Any, worker: WorkerProcess) -> None:
    engine, now = worker.get("/info").json()["engine"], worker.get("/status").json()
    plan, total = engine["plan"], engine["device_total_bytes"]
    parts = {each["part"]: each["bytes"] for each in now["memory"]}
    kv = [parts.pop(name) for name in ("kv_used", "kv_cached", "kv_free")]
    assert parts | {"kv": sum(kv)} == plan and now["device_bytes"] == total
    assert kv[1] > 0 if now["kv_cells"]["cached"] else kv[1] == 0
    expect(page.locator("#memory-legend li")).to_have_count(len(now["memory"]))

    def share(part: str, bar: str) -> float:
        widths = [page.locator(each).bounding_box()["width"] for each in (f"{bar} .{part}", bar)]
        return float(widths[0] / widths[1])

    needed = sum(plan.values())
    assert share("worker", "#device-bar") == pytest.approx(needed / total, abs=0.005)
    for part in ("weights", "margin", "states"):
        assert share(part, "#worker-bar") == pytest.approx(plan[part] / needed, abs=0.005)
    assert "weights" in page.get_attribute("#memory", "aria-label")


def test_a_running_request_is_seen_without_its_text(page: Any, worker: WorkerProcess) -> None:
    with worker.streaming(FOX, max_tokens=900, ignore_eos=True) as response:
        chunks = response.iter_raw()
        while b"event: token" not in next(chunks):
            continue
        worker.freeze_engine()
        expect(page.locator("#requests tr")).to_have_count(1)
        expect(page.locator("#requests td").first).to_have_text("decoding")
        assert "fox" not in json.dumps(worker.get("/status").json())
        assert "fox" not in page.content()
        worker.thaw_engine()
        for _ in chunks:
            continue
    expect(page.locator("#requests tr")).to_have_count(0)


def test_charts_show_the_last_hour(page: Any, worker: WorkerProcess) -> None:
    figures = page.locator("#charts figure")
    expect(figures).to_have_count(6)
    with worker.streaming(FOX, max_tokens=900, ignore_eos=True) as response:
        for _ in response.iter_raw():
            continue
    rate = figures.filter(has_text="Tokens written").locator(".values")
    expect(rate).to_have_text(re.compile(r"[1-9]"))
    first = figures.filter(has_text="First token").locator(".values")
    expect(first).to_have_text(re.compile(r"p50 \d.*p95 \d"))
    columns = worker.get("/status/history").json()
    assert {len(column) for column in columns.values()} == {len(columns["at"])}
    assert any(columns["tokens_per_second"])


def test_a_worker_of_some_seconds_has_charts_of_minutes(page: Any, worker: WorkerProcess) -> None:
    columns = worker.get("/status/history").json()
    first = {name: [0] for name in columns} | {"at": [1_700_000_000.0]}
    span = page.evaluate(
        "async (columns) => { const { Charts } = await import('/page/charts.js');"
        " const made = new Charts(document.createElement('div')); made.show(columns);"
        " await new Promise((drawn) => setTimeout(drawn, 100));"
        " const { min, max } = made.plots[0].plot.scales.x; return max - min; }",
        first,
    )
    assert span == 300


def test_a_refusal_is_told_with_its_reason_and_nothing_of_the_body(
    page: Any, worker: WorkerProcess
) -> None:
    body = {"prompt": "a secret", "max_tokens": "another secret"}
    assert worker.post("/v1/completions", body).status_code == 400
    expect(page.locator("#refusals")).to_contain_text("max_tokens (type)")
    assert "secret" not in page.content() and "secret" not in worker.get("/status").text


def test_links_lead_to_what_they_say(page: Any, worker: WorkerProcess) -> None:
    for name in ("Chat", "API", "Metrics", "Info"):
        path = page.get_by_role("link", name=name, exact=True).get_attribute("href")
        assert worker.get(f"/{path}").status_code == 200


PAGES = {"/": "#facts dd", "/docs/": "#operations details"}
"""Each page, with an element that exists once it is rendered."""


@pytest.mark.parametrize("path", PAGES)
def test_it_asks_no_other_host(browser: Any, worker: WorkerProcess, path: str) -> None:
    opened = browser.new_page()
    hosts = own_hosts(opened)
    opened.goto(worker.base_url + path)
    opened.wait_for_selector(PAGES[path], state="attached")
    opened.wait_for_timeout(3000)
    opened.close()
    assert set(hosts) == {worker.base_url.removeprefix("http://")}


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_reader_who_cannot_see_can_use_it(
    browser: Any, worker: WorkerProcess, scheme: str, path: str
) -> None:
    for _ in range(5):  # a scrolling list of refusals
        worker.post("/v1/completions", {"max_tokens": "many"})
    opened = browser.new_page(color_scheme=scheme)
    opened.goto(worker.base_url + path)
    opened.wait_for_selector(PAGES[path], state="attached")
    opened.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    opened.wait_for_timeout(500)
    assert violations(opened) == []
    opened.close()


def test_the_api_is_described_with_every_path_and_field(page: Any, worker: WorkerProcess) -> None:
    document = worker.get("/openapi.json").json()
    page.get_by_role("link", name="API").click()
    expect(page.locator("#docs-text")).to_contain_text(document["info"]["version"])
    paths = [each.strip() for each in re.split(r"\s|,", page.inner_text("#operations"))]
    assert set(document["paths"]) <= set(paths)
    page.locator("#operations summary", has_text="/execute Run").click()
    execute = document["paths"]["/execute"]["post"]
    headers = [each["$ref"].rpartition("/")[2] for each in execute["parameters"]]
    headers += {name: "" for each in execute["responses"].values() for name in each["headers"]}
    names = page.locator("#operations details[open] tbody code")
    expect(names).to_have_text(headers)
    page.get_by_role("link", name="ExecuteRequest").click()
    shown = page.locator("#ExecuteRequest tbody tr td:first-child")
    fields = document["components"]["schemas"]["ExecuteRequest"]["properties"]
    expect(shown).to_have_text(list(fields))


def test_the_status_is_asked_for_only_while_the_page_is_seen(page: Any) -> None:
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    with page.expect_request("**/status"):
        pass
    hide(page)
    page.wait_for_timeout(500)
    urls.clear()
    page.wait_for_timeout(5000)
    assert urls == []


def test_a_restart_of_the_engine_is_told(page: Any, worker: WorkerProcess) -> None:
    worker.kill_engine()
    expect(page.locator("#restarts")).to_contain_text("SIGKILL")
    expect(page.locator("#restarts-text")).to_contain_text("1 since the start")
    expect(page.locator("#state .dot")).to_have_class("dot ready")
    assert worker.metric("worker_engine_respawns_total") == 1


def test_a_worker_that_stops_and_comes_back_is_noticed(tab: Any, start_worker: StartWorker) -> None:
    running = start_worker()
    faults = faults_of(tab)
    tab.goto(running.base_url)
    expect(tab.locator("#state .dot")).to_have_class("dot ready")
    expect(tab.locator("#known")).to_be_visible()
    running.kill()
    expect(tab.locator("#state")).to_contain_text(re.compile(r"last seen: \d\d:"))
    expect(tab.locator("#known")).to_have_css("filter", "grayscale(1)")
    running = start_worker("--port", str(running.port))
    expect(tab.locator("#state .dot")).to_have_class("dot ready")
    expect(tab.locator("#facts")).to_contain_text("tiny-model")
    expect(tab.locator("#known")).to_have_css("filter", "none")
    assert faults == []


def test_a_sleeping_worker_is_shown_and_not_woken(tab: Any, start_worker: StartWorker) -> None:
    running = start_worker()
    assert running.post("/sleep", {}).status_code == 200
    tab.goto(running.base_url)
    expect(tab.locator("#state")).to_contain_text("sleeping")
    expect(tab.locator("#facts")).to_contain_text("tiny-model")
    tab.wait_for_timeout(3000)
    assert running.get("/ready").json()["state"] == "sleeping"


def test_it_is_used_with_the_keyboard_alone(page: Any, worker: WorkerProcess) -> None:
    for name in ("Chat", "API", "Metrics", "Info"):
        tab_to(page, name)
        assert is_focus_seen(page), name
    tab_to(page, "Table of requests")
    tab_to(page, "Residency proof: every buffer, as llama.cpp reports it")
    assert is_focus_seen(page)
    page.keyboard.press("Enter")
    expect(page.locator("#buffers tr").first).to_be_visible()
    tab_to(page, "Chat", backwards=True)
    page.keyboard.press("Enter")
    expect(page.get_by_placeholder("Type a message")).to_be_visible()
