// Live charts of the last minutes, fed by successive scrapes of /metrics.

import { growth, quantile } from "./metrics.js";

const KEPT = 150;
const SHOWN_SECONDS = 300;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const CHARTS = [
  { title: "tokens a second", lines: [["tokens/s", "--weights", (a, b, s) => growth(a, b, "worker_tokens_generated_total") / s]] },
  { title: "requests", lines: [
    ["running", "--kv", (a, b) => b.get("worker_requests_running") ?? 0],
    ["waiting", "--compute", (a, b) => b.get("worker_queue_depth") ?? 0]] },
  { title: "KV cells in use, %", lines: [
    ["used", "--kv", (a, b) => 100 * (b.get("worker_kv_cells_used") ?? 0) / Math.max(b.get("worker_kv_cells_total") ?? 0, 1)]] },
  { title: "time to first token, ms", lines: [
    ["p50", "--weights", (a, b) => milliseconds(quantile(a, b, "worker_time_to_first_token_seconds", 0.5))],
    ["p95", "--compute", (a, b) => milliseconds(quantile(a, b, "worker_time_to_first_token_seconds", 0.95))]] },
  { title: "between tokens, ms", lines: [
    ["p50", "--weights", (a, b) => milliseconds(quantile(a, b, "worker_inter_token_seconds", 0.5))],
    ["p95", "--compute", (a, b) => milliseconds(quantile(a, b, "worker_inter_token_seconds", 0.95))]] },
];

function milliseconds(seconds) { return seconds === null ? null : seconds * 1000; }

export class Charts {
  constructor(container) {
    this.container = container;
    this.before = null;
    this.data = CHARTS.map(({ lines }) => [[], ...lines.map(() => [])]);
    this.plots = CHARTS.map((chart, index) => this.draw(chart, index));
    new ResizeObserver(() => this.resize()).observe(container);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  draw({ title, lines }, index) {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    figure.append(caption);
    this.container.append(figure);
    const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, size: 44 };
    const options = {
      width: Math.max(figure.clientWidth - 18, 200), height: 150,
      cursor: { drag: { x: false, y: false } },
      scales: { x: { range: (_, low, high) => [(high ?? Date.now() / 1000) - SHOWN_SECONDS, high ?? Date.now() / 1000] }, y: { range: (_, low, high) => [0, Math.max(high ?? 1, 1)] } },
      axes: [{ ...axis, size: 30, values: (_, ticks) => ticks.map((at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" })) }, axis],
      series: [{ label: "at", value: (_, at) => at ? new Date(at * 1000).toLocaleTimeString() : "–" }, ...lines.map(([label, colour]) => ({
        label, stroke: style(colour), width: 2, spanGaps: true,
        value: (_, value) => value === null || value === undefined ? "–" : value.toFixed(1),
      }))],
    };
    return { figure, plot: new uPlot(options, this.data[index], figure) };
  }

  redraw() {
    for (const { figure } of this.plots) figure.remove();
    this.plots = CHARTS.map((chart, index) => this.draw(chart, index));
  }

  resize() {
    for (const { figure, plot } of this.plots) {
      if (figure.clientWidth > 0) plot.setSize({ width: figure.clientWidth - 18, height: 150 });
    }
  }

  add(series, atSeconds) {
    if (this.before !== null) {
      const seconds = Math.max(atSeconds - this.before.at, 1e-3);
      for (const [index, { lines }] of CHARTS.entries()) {
        const columns = this.data[index];
        columns[0].push(atSeconds);
        for (const [n, [, , read]] of lines.entries()) columns[n + 1].push(read(this.before.series, series, seconds));
        for (const column of columns) if (column.length > KEPT) column.shift();
        this.plots[index].plot.setData(columns);
      }
    }
    this.before = { series, at: atSeconds };
  }
}
