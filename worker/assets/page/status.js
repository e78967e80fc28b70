// The status view: state, loading progress, memory map, charts and facts.

import { call, events, json } from "./client.js";
import { Charts } from "./charts.js";
import { parse } from "./metrics.js";

const PERIOD_MS = 2000;
// The phases of a start, as the terminal names them too.
const DOING = {
  starting: "Starting", hash: "Looking for an earlier conversion", resolve: "Looking for the model",
  download: "Downloading the model", verify: "Checking the download", convert: "Converting the model",
  preflight: "Planning memory", load: "Loading the model", residency: "Checking where everything lies",
  warmup: "Warming up", recovering: "Starting the engine again", ready: "Ready",
};
const element = (id) => document.getElementById(id);

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return `${n.toFixed(unit < 2 ? 0 : 1)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// Parts are [name, kind, bytes]; their widths are shares of `whole`.
function drawBar(bar, parts, whole) {
  bar.replaceChildren(...parts.filter(([, , n]) => n > 0).map(([, kind, n]) => {
    const part = document.createElement("span");
    part.className = kind;
    part.style.width = `${100 * n / whole}%`;
    return part;
  }));
}

export function startStatus() {
  const view = new Status();
  document.addEventListener("visibilitychange", () => view.refresh());
  view.refresh();
  return view;
}

class Status {
  constructor() {
    this.charts = null;
    this.info = null;
    this.series = null;
    this.timer = null;
    this.watching = false;
  }

  // One round; the next one follows only while somebody can see the page.
  async refresh() {
    clearTimeout(this.timer);
    if (document.visibilityState !== "visible") return;
    try {
      await this.round();
    } catch {
      this.state("unreachable", "the worker does not answer");
      this.info = null;
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh(), PERIOD_MS);
  }

  async round() {
    const { value: ready } = await json("ready");
    this.state(ready.ready ? "ready" : ready.state, ready.ready ? `ready, ${ready.state}` : ready.state);
    if (!ready.ready && ready.state !== "draining") this.watchLoading();
    const response = await call("metrics");
    if (response.ok) {
      this.series = parse(await response.text());
      this.charts ??= new Charts(element("charts"));
      this.charts.add(this.series, Date.now() / 1000);
    }
    const crashes = this.series?.get("worker_engine_crashes_total") ?? 0;
    if (ready.ready && (this.info === null || crashes !== this.info.engine_crashes_then)) {
      const { status, value } = await json("info");
      if (status === 200) {
        this.info = { ...value, engine_crashes_then: crashes };
        element("status").classList.remove("unknown");
        this.facts();
        this.restarts();
      }
    }
    if (this.info !== null) this.memory();
  }

  state(kind, text) {
    document.querySelector("#state .dot").className = `dot ${kind}`;
    if (element("state-text").textContent !== text) element("state-text").textContent = text;
  }

  // The worker's own stream of progress, for as long as it loads.
  async watchLoading() {
    if (this.watching) return;
    this.watching = true;
    element("loading").hidden = false;
    try {
      const response = await call("v1/loading/progress");
      if (!response.ok) return;
      for await (const data of events(response)) {
        const { phase, percent, bytes_per_second: rate } = JSON.parse(data);
        element("loading-bar").value = percent;
        const share = percent > 0 ? ` ${Math.round(percent)} %` : "";
        element("loading-text").textContent = `${DOING[phase] ?? phase}${share}${rate ? `, ${bytes(rate)}/s` : ""}`;
      }
    } finally {
      this.watching = false;
      element("loading").hidden = true;
    }
  }

  memory() {
    const plan = this.info.engine.plan;
    const total = this.info.engine.device_total_bytes;
    const cells = Math.max(this.series?.get("worker_kv_cells_total") ?? 0, 1);
    const cached = this.series?.get("worker_kv_cells_cached") ?? 0;
    const used = (this.series?.get("worker_kv_cells_used") ?? 0) - cached;
    const share = (n) => (plan.kv ?? 0) * n / cells;
    const known = new Set(["weights", "kv", "margin"]);
    const work = Object.entries(plan).filter(([name]) => !known.has(name)).reduce((sum, [, n]) => sum + n, 0);
    const parts = [
      ["weights", "weights", plan.weights ?? 0], ["KV used", "kv", share(used)],
      ["KV cached", "cached", share(cached)], ["KV free", "kv-free", share(Math.max(cells - used - cached, 0))],
      ["compute and output", "compute", work], ["margin", "margin", plan.margin ?? 0],
    ];
    const planned = parts.reduce((sum, [, , n]) => sum + n, 0);
    const percent = 100 * planned / Math.max(total, planned, 1);
    const text = `This worker takes ${bytes(planned)} of ${bytes(total)} on ${this.info.engine.device} (${percent.toFixed(1)} %).`;
    element("device-text").textContent = text;
    drawBar(element("device-bar"), [["", "worker", planned]], Math.max(total, planned, 1));
    document.querySelector("#zoom polygon").setAttribute("points", `0,0 ${percent},0 100,10 0,10`);
    drawBar(element("worker-bar"), parts, Math.max(planned, 1));
    element("memory").setAttribute("aria-label", `${text} ${parts.map(([name, , n]) => `${name} ${bytes(n)}`).join(", ")}`);
    element("memory-legend").replaceChildren(...parts.map(([name, kind, n]) => {
      const item = document.createElement("li");
      const mark = document.createElement("i");
      mark.className = `swatch ${kind}`;
      item.append(mark, `${name} ${bytes(n)}`);
      return item;
    }));
  }

  // The list holds the last ones, the counter has counted all.
  restarts() {
    const crashes = this.info.engine_crashes.toReversed();
    element("restarts-text").textContent = crashes.length === 0
      ? "None: the first engine still serves." : `${this.info.engine_crashes_then} since the start. Newest first:`;
    element("restarts").replaceChildren(...crashes.map(({ at, cause, ready_seconds: served }) => {
      const item = document.createElement("li");
      const time = document.createElement("time");
      time.dateTime = at;
      time.textContent = new Date(at).toLocaleString();
      time.className = "soft";
      item.append(time, document.createElement("br"), `${cause}, ${served > 0 ? `after it had served ${duration(served)}` : "before it was ready"}`);
      return item;
    }));
  }

  facts() {
    const { model, engine, residency, backend, version, limits, worker_id: id } = this.info;
    element("serves").textContent = `${this.info.model_ref} on ${engine.device}`;
    const rows = {
      model: `${model.name} · ${model.architecture} · ${model.quant_kind} · ${(model.n_params / 1e6).toFixed(0)} M parameters · ${bytes(model.size_bytes)}`,
      context: `${model.context_length} tokens a sequence of ${model.trained_context_length} trained · ${engine.slots} slots`,
      device: `${engine.device} (${backend})${engine.cpu_variant ? ` · ${engine.cpu_variant}` : ""}`,
      threads: engine.threads_derivation,
      batch: `${engine.batch} a decode, ${engine.micro_batch} a graph`,
      vocabulary: `${model.vocab_size} · ${model.tokenizer_kind}`,
      "chat template": model.has_chat_template ? "yes" : "none",
      queue: `${limits.max_queued_requests} requests, ${limits.max_queued_prompt_tokens} prompt tokens`,
      loaded: `in ${engine.load_seconds} s`,
      worker: `${id} · version ${version} · llama.cpp ${engine.build?.llama_cpp_commit?.slice(0, 9) ?? ""}`,
    };
    element("facts").replaceChildren(...Object.entries(rows).flatMap(([name, value]) => {
      const term = document.createElement("dt");
      const description = document.createElement("dd");
      term.textContent = name;
      description.textContent = value;
      return [term, description];
    }));
    element("residency").textContent = residency.resident
      ? `All ${residency.layers_total} layers on ${residency.device}. ${residency.allowed_host_buffers.join(" ")}`
      : residency.violation;
    element("buffers").replaceChildren(...residency.buffers.map((buffer) => {
      const row = document.createElement("tr");
      for (const text of [buffer.kind, buffer.device, bytes(buffer.size_bytes)]) {
        const cell = document.createElement("td");
        cell.textContent = text;
        row.append(cell);
      }
      return row;
    }));
  }
}
