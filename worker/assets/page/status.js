// Shows the worker's state: /ready to everybody, /status and /info to those with the token.

import { answer, json } from "./client.js";
import { Charts, rounded } from "./charts.js";
import { element, made, row } from "./dom.js";
import { Fleet } from "./fleet.js";
import { startTry } from "./try.js";

const PERIOD_MS = 2000;
const LOADING_PERIOD_MS = 500;
const HISTORY_MS = 10_000;
// The phases of a start, named as on the terminal.
const PHASES = {
  starting: "Starting", hash: "Looking for an earlier conversion", resolve: "Looking for the model",
  download: "Downloading the model", verify: "Checking the download", convert: "Converting the model",
  preflight: "Planning memory", load: "Loading the model", residency: "Checking that everything is on the device",
  draft: "Loading the draft model", projector: "Loading the projector", warmup: "Warming up",
  recovering: "Starting the engine again", ready: "Ready",
};
const PARTS = {
  weights: "weights", kv_used: "KV in use", kv_cached: "KV kept for reuse", kv_free: "KV free", kv: "KV",
  compute: "compute", output: "output", states: "conversations in memory, at most", margin: "kept free",
};
const TIERS = {
  device: ["found in KV cells", "kv"], memory: ["found in memory", "cached"],
  disk: ["found on disk", "states"], computed: ["computed", "compute"],
};
const count = (n) => n.toLocaleString("en");

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit += 1; }
  return `${n.toFixed(unit < 2 ? 0 : 1)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${(seconds / 3600).toFixed(1)} h` : `${Math.round(seconds / 86_400)} days`;
}

// The rows of a description list.
function definitions(list, rows) {
  list.replaceChildren(...Object.entries(rows).flatMap(([name, value]) => [made("dt", name), made("dd", value)]));
}

// Parts are [name, kind, amount]; their widths are shares of `whole`.
function drawBar(bar, parts, whole) {
  bar.replaceChildren(...parts.filter(([, , n]) => n > 0).map(([, kind, n]) => {
    const part = made("span", "", kind);
    part.style.width = `${100 * n / whole}%`;
    return part;
  }));
}

function drawLegend(list, parts, shown) {
  list.replaceChildren(...parts.map(([name, kind, n]) => {
    const item = document.createElement("li");
    item.append(made("i", "", `swatch ${kind}`), `${name} ${shown(n)}`);
    return item;
  }));
}

// An event of the past: its time, and what happened.
function event(at, text) {
  const item = document.createElement("li");
  const time = made("time", new Date(at).toLocaleString(), "soft");
  time.dateTime = new Date(at).toISOString();
  item.append(time, document.createElement("br"), text);
  return item;
}

export class Status {
  constructor() {
    this.charts = null;
    this.info = null;
    this.crashes = -1;
    this.timer = null;
    this.historyAt = -Infinity;
    this.seen = null;
    this.fleet = new Fleet(() => this.refresh());
    this.isAsking = false;
    this.asksAgain = false;
  }

  // One round, never two at once; the next one follows only while somebody can see the page.
  async refresh() {
    clearTimeout(this.timer);
    if (document.visibilityState !== "visible") return;
    this.asksAgain = this.isAsking;
    if (this.isAsking) return;
    this.isAsking = true;
    let period = PERIOD_MS;
    try {
      if (await this.round()) period = LOADING_PERIOD_MS;
    } catch (error) {
      this.state("unreachable", `the worker does not answer; last seen: ${this.seen ?? "never"}`);
      this.info = null;
    }
    this.isAsking = false;
    this.timer = setTimeout(() => this.refresh(), this.asksAgain ? 0 : period);
  }

  // Whether the worker is still starting.
  async round() {
    let { value: ready } = await json("ready", { anyone: true });
    if (ready.workers !== undefined) {
      const before = this.fleet.shown;
      if (this.fleet.show(ready.workers) !== before) {
        this.info = null;
        this.historyAt = -Infinity;
      }
      if (this.fleet.shown === null) return this.state("loading", "no worker is available");
      ({ value: ready } = await json("ready"));
    }
    this.state(ready.ready ? "ready" : ready.state, ready.ready ? `ready, ${ready.state}` : ready.state);
    const { status, value: now } = await json("status");
    const starts = !ready.ready && ready.state !== "draining" && ready.state !== "failed";
    element("loading").hidden = !starts;
    if (starts) this.loading(ready, status === 200 ? now.bytes_per_second : null);
    if (status !== 200) return starts;
    if (["ready", "sleeping"].includes(now.state) && (this.info === null || now.engine_crashes !== this.crashes)) await this.learn(now);
    this.requests(now);
    this.events(now);
    if (this.info === null) return starts;
    let columns = null;
    if (performance.now() - this.historyAt >= HISTORY_MS) {
      this.historyAt = performance.now();
      columns = await answer("status/history");
    }
    element("known").hidden = false; // everything below it in one go, so that the layout does not jump
    this.charts ??= new Charts(element("charts"));
    this.charts.show(columns);
    this.tiles(now);
    this.memory(now);
    this.cache(now);
    return starts;
  }

  state(kind, text) {
    element("known").classList.toggle("old", kind === "unreachable");
    if (kind !== "unreachable") this.seen = new Date().toLocaleTimeString([], { hourCycle: "h23" });
    document.querySelector("#state .dot").className = `dot ${kind}`;
    if (element("state-text").textContent !== text) element("state-text").textContent = text;
  }

  loading({ phase, percent }, rate) {
    element("loading-bar").value = percent;
    const share = percent > 0 ? ` ${Math.round(percent)} %` : "";
    element("loading-text").textContent = `${PHASES[phase] ?? phase}${share}${rate ? `, ${bytes(rate)}/s` : ""}`;
  }

  // Shows what only changes with the engine.
  async learn(now) {
    const { status, value } = await json("info");
    if (status !== 200) return;
    this.info = value;
    this.crashes = now.engine_crashes;
    this.facts();
    const { model } = value;
    const pools = model.pooling !== null;
    startTry(pools ? (model.pooling === "rank" ? "ranking" : "similarity") : model.has_chat_template ? null : "completion");
    const chat = !pools && model.has_chat_template ? await fetch("chat/", { method: "HEAD" }) : null;
    element("chat-link").hidden = !(chat?.ok);
    if (this.fleet.shown !== null) element("chat-link").href = await this.fleet.chat();
    element("no-chat").hidden = chat === null || chat.ok;
  }

  tiles(now) {
    const columns = this.charts.columns;
    const rate = columns?.tokens_per_second.at(-1);
    const asked = Object.values(now.prompt_tokens).reduce((sum, n) => sum + n, 0);
    const found = asked - now.prompt_tokens.computed;
    const tiles = {
      "tokens a second": rate === undefined ? "–" : rounded(rate),
      "running": `${now.running} of ${now.slots} slots`,
      "waiting": now.queued ? `${now.queued} (${count(now.queued_prompt_tokens)} prompt tokens)` : "0",
      "prompt tokens reused": asked ? `${(100 * found / asked).toFixed(0)} %` : "–",
      "tokens written": count(now.tokens_out),
      "up for": duration(now.uptime_seconds),
    };
    element("tiles").replaceChildren(...Object.entries(tiles).map(([name, value]) => {
      const tile = made("div", "", "card");
      tile.append(made("dt", name), made("dd", value));
      return tile;
    }));
  }

  requests(now) {
    element("requests").replaceChildren(...now.requests.map((each) => {
      const share = 100 * each.computed_tokens / Math.max(each.prompt_tokens, 1);
      const doing = { waiting: "waiting", prompt: `prompt, ${share.toFixed(0)} %`, decoding: "decoding" }[each.doing];
      return row(doing, count(each.prompt_tokens), count(each.cached_tokens), count(each.tokens_out), duration(each.seconds));
    }));
    const listed = now.requests.filter(({ doing }) => doing === "waiting").length;
    const more = now.queued - listed;
    element("requests-text").textContent = now.requests.length === 0
      ? `None; ${now.slots} slots are free.` : more > 0 ? `${count(more)} more wait.` : "";
  }

  events(now) {
    element("refusals-text").textContent = now.refusals.length === 0 ? "None." : "";
    element("refusals").replaceChildren(...now.refusals.map(
      ({ at, path, status, code, reason }) => event(1000 * at, `${status} ${code} at ${path}: ${reason}`)));
  }

  memory(now) {
    const device = this.info.engine.device;
    const parts = now.memory.map(({ part, bytes: n }) => [PARTS[part] ?? part, part, n]);
    const planned = parts.reduce((sum, [, , n]) => sum + n, 0);
    const whole = Math.max(now.device_bytes, planned, 1);
    const percent = 100 * planned / whole;
    const text = `This worker takes up to ${bytes(planned)} of the ${bytes(whole)} of ${device} (${percent.toFixed(1)} %).`;
    element("device-text").textContent = text;
    drawBar(element("device-bar"), [["", "worker", planned]], whole);
    document.querySelector("#zoom polygon").setAttribute("points", `0,0 ${percent},0 100,10 0,10`);
    drawBar(element("worker-bar"), parts, Math.max(planned, 1));
    element("memory").setAttribute("aria-label", `${text} ${parts.map(([name, , n]) => `${name} ${bytes(n)}`).join(", ")}`);
    drawLegend(element("memory-legend"), parts, bytes);
  }

  cache(now) {
    const parts = Object.entries(TIERS).map(([tier, [name, kind]]) => [name, kind, now.prompt_tokens[tier]]);
    const whole = parts.reduce((sum, [, , n]) => sum + n, 0);
    drawBar(element("cache-bar"), parts, Math.max(whole, 1));
    drawLegend(element("cache-legend"), parts, count);
  }

  facts() {
    const { model, engine, residency, backend, version, limits, worker_id: id, engine_crashes: crashes } = this.info;
    element("serves").textContent = `${this.info.model_ref} on ${engine.device}`;
    document.title = `${model.name} · llorch-worker`;
    const { speculation, kv } = engine;
    definitions(element("facts"), {
      model: `${model.name} · ${model.architecture} · ${model.quant_kind} · ${(model.n_params / 1e6).toFixed(0)} M parameters · ${bytes(model.size_bytes)}`,
      context: `${count(model.context_length)} tokens a sequence of ${count(model.trained_context_length)} trained · ${engine.slots} slots`,
      "KV cache": `${count(kv.cells)} cells: ${kv.reason}${kv.store_bytes === null ? "" : ` · store of ${bytes(kv.store_bytes)}`}`,
      device: `${engine.device} (${backend})${engine.cpu_variant ? ` · ${engine.cpu_variant}` : ""}`,
      ...engine.findings,
      confined: Object.entries(engine.confinement).map(([name, { holds, how }]) => `${name.replaceAll("_", " ")}: ${holds ? how : `no: ${how}`}`).join(", "),
      batch: `${engine.batch} a decode, ${engine.micro_batch} a graph`,
      speculation: `${speculation.kind}${speculation.reason ? `: ${speculation.reason}` : ""}`,
      vocabulary: `${count(model.vocab_size)} · ${model.tokenizer_kind}`,
      "chat template": model.has_chat_template ? "yes" : "none",
      queue: `${limits.max_queued_requests} requests, ${count(limits.max_queued_prompt_tokens)} prompt tokens`,
      loaded: `in ${engine.load_seconds} s`,
      worker: `${id} · version ${version} · llama.cpp ${engine.build?.llama_cpp_commit?.slice(0, 9) ?? ""}`,
    });
    element("residency").textContent =
      `All ${residency.layers_total} layers on ${residency.device}. ${residency.allowed_host_buffers.join(" ")}`;
    element("buffers").replaceChildren(...residency.buffers.map((each) => row(each.kind, each.device, bytes(each.size_bytes))));
    element("restarts-text").textContent = crashes.length === 0
      ? "None: the first engine is still running." : `${this.crashes} since the start. Newest first:`;
    element("restarts").replaceChildren(...crashes.toReversed().map(({ at, cause, ready_seconds: served }) =>
      event(at, `${cause}, ${served > 0 ? `after it had served ${duration(served)}` : "before it was ready"}`)));
  }
}
