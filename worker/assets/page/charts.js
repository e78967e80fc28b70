// Live charts of the last minutes, fed by successive scrapes of /metrics.

import { growth, quantile } from "./metrics.js";

const KEPT = 150;
const HEIGHT = 130;
const [LEAST_SECONDS, MOST_SECONDS] = [60, 300];
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const milliseconds = (seconds) => seconds === null ? null : seconds * 1000;
const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hourCycle: "h23", hour: "2-digit", minute: "2-digit", second: "2-digit" });

// Each line: its name, its colour, and its value from two scrapes that are `s` seconds apart.
const CHARTS = [
  { title: "Tokens a second", lines: [["", "weights", (a, b, s) => growth(a, b, "worker_tokens_generated_total") / s]] },
  { title: "Requests", lines: [
    ["running", "kv", (a, b) => b.get("worker_requests_running") ?? 0],
    ["waiting", "compute", (a, b) => b.get("worker_queue_depth") ?? 0]] },
  { title: "KV cells, %", lines: [
    ["used", "kv", (a, b) => cellShare(b, "worker_kv_cells_used")],
    ["cached", "cached", (a, b) => cellShare(b, "worker_kv_cells_cached")]] },
  { title: "First token, ms", lines: quantiles("worker_time_to_first_token_seconds") },
  { title: "Between tokens, ms", lines: quantiles("worker_inter_token_seconds") },
];

function cellShare(series, name) {
  return 100 * (series.get(name) ?? 0) / Math.max(series.get("worker_kv_cells_total") ?? 0, 1);
}

function quantiles(name) {
  return [["p50", "weights", 0.5], ["p95", "compute", 0.95]].map(
    ([label, colour, q]) => [label, colour, (a, b) => milliseconds(quantile(a, b, name, q))]);
}

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
    figure.className = "card";
    const caption = document.createElement("figcaption");
    const name = document.createElement("span");
    name.className = "title";
    name.textContent = title;
    const values = document.createElement("span");
    values.className = "values";
    caption.append(name, values);
    figure.append(caption);
    this.container.append(figure);
    const axis = { stroke: style("soft"), grid: { stroke: style("line"), width: 1 }, ticks: { show: false }, size: 40 };
    const options = {
      width: this.widthIn(figure), height: HEIGHT,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, y: false },
      scales: { x: { range: () => this.window(index) }, y: { range: (_, low, high) => [0, Math.max(1.15 * (high ?? 0), 1)] } },
      axes: [{ ...axis, size: 26, space: 80, values: (_, ticks) => ticks.map(clock) }, axis],
      series: [{}, ...lines.map(([, colour]) => ({ stroke: style(colour), width: 2, spanGaps: true }))],
      hooks: { setCursor: [(plot) => this.showValues(index, plot.cursor.idx)] },
    };
    return { figure, values, plot: new uPlot(options, this.data[index], figure) };
  }

  widthIn(figure) { return Math.max(figure.clientWidth - 24, 200); }

  // From the first scrape on, in seconds since the epoch.
  window(index) {
    const times = this.data[index][0];
    const last = times.at(-1) ?? Date.now() / 1000;
    const age = last - (times[0] ?? last);
    return [last - Math.min(Math.max(age, LEAST_SECONDS), MOST_SECONDS), last];
  }

  // The values under the pointer, or else the last ones there were.
  showValues(index, at) {
    const plot = this.plots?.[index];
    if (!plot) return;
    const columns = this.data[index].slice(1);
    plot.values.replaceChildren(...CHARTS[index].lines.map(([label, colour], n) => {
      const value = at === null || at === undefined ? columns[n].findLast((each) => each !== null) : columns[n][at];
      const shown = document.createElement("span");
      const mark = document.createElement("i");
      mark.className = `swatch ${colour}`;
      const number = value === null || value === undefined ? "–" : value.toFixed(value < 100 && value % 1 ? 1 : 0);
      shown.append(mark, `${label} ${number}`.trim());
      return shown;
    }));
  }

  redraw() {
    for (const { figure, plot } of this.plots) { plot.destroy(); figure.remove(); }
    this.plots = CHARTS.map((chart, index) => this.draw(chart, index));
    this.show();
  }

  resize() {
    if (this.container.clientWidth === 0) return;
    for (const { figure, plot } of this.plots) plot.setSize({ width: this.widthIn(figure), height: HEIGHT });
    this.show();
  }

  show() {
    if (this.container.clientWidth === 0) return; // the other view is open
    for (const [index, { plot }] of this.plots.entries()) {
      plot.setData(this.data[index]);
      this.showValues(index, plot.cursor.idx);
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
      }
      this.show();
    }
    this.before = { series, at: atSeconds };
  }
}
