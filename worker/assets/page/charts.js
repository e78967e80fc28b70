// Charts of the last hour, drawn by uPlot from the columns of /status/history.

import { made } from "./dom.js";

const HEIGHT = 130;
const LEAST_SECONDS = 300;
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hourCycle: "h23", hour: "2-digit", minute: "2-digit" });

// Values without a neighbour, through which no line can be drawn.
const alone = (plot, line) => plot.data[line].flatMap(
  (value, at, column) => value !== null && (column[at - 1] ?? column[at + 1] ?? null) === null ? [at] : []);

export const rounded = (value) => value.toFixed(value < 100 && value % 1 ? 1 : 0);

// Each line: its name, its colour and its column.
const QUANTILES = (name) => [["p50", "weights", `${name}_ms_p50`], ["p95", "compute", `${name}_ms_p95`]];
const CHARTS = [
  { title: "Tokens written, a second", lines: [["", "weights", "tokens_per_second"]] },
  { title: "Prompt tokens, a second", lines: [
    ["computed", "compute", "prompt_computed_per_second"], ["cells", "kv", "prompt_device_per_second"],
    ["memory", "cached", "prompt_memory_per_second"], ["disk", "states", "prompt_disk_per_second"],
  ] },
  { title: "Requests", lines: [["running", "kv", "running"], ["waiting", "compute", "waiting"]] },
  { title: "KV cells, %", lines: [["in use", "kv", "cells_used"], ["kept for reuse", "cached", "cells_cached"]] },
  { title: "First token, ms", lines: QUANTILES("first_token") },
  { title: "Between tokens, ms", lines: QUANTILES("inter_token") },
];

export class Charts {
  constructor(container) {
    this.container = container;
    this.columns = null;
    this.draw();
    new ResizeObserver(() => this.resize()).observe(container);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  draw() {
    for (const { figure, plot } of this.plots ?? []) { plot.destroy(); figure.remove(); }
    this.plots = CHARTS.map((chart) => this.made(chart));
    this.show(this.columns);
  }

  made({ title, lines }) {
    const values = made("span", "", "values");
    const caption = made("figcaption", made("span", title, "title"));
    caption.append(values);
    const figure = made("figure", caption, "card");
    this.container.append(figure);
    const axis = { stroke: style("soft"), grid: { stroke: style("line"), width: 1 }, ticks: { show: false }, size: 44 };
    const options = {
      width: this.widthIn(figure), height: HEIGHT,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, y: false },
      scales: { x: { range: () => this.span() }, y: { range: (_, low, high) => [0, Math.max(1.15 * (high ?? 0), 1)] } },
      axes: [{ ...axis, size: 26, space: 80, values: (_, ticks) => ticks.map(clock) }, axis],
      series: [{}, ...lines.map(([, colour]) => ({ stroke: style(colour), width: 2, points: { show: true, size: 6, fill: style(colour), filter: alone } }))],
      hooks: { setCursor: [(plot) => this.showValues({ values, lines }, plot.cursor.idx)] },
    };
    return { figure, values, lines, plot: new uPlot(options, [[], ...lines.map(() => [])], figure) };
  }

  // With a single row, uPlot would show the following day.
  span() {
    const at = this.columns?.at ?? [];
    const last = at.at(-1) ?? Date.now() / 1000;
    return [Math.min(at[0] ?? last, last - LEAST_SECONDS), last];
  }

  widthIn(figure) { return Math.max(figure.clientWidth - 24, 200); }

  // The values under the pointer, else the latest ones.
  showValues({ values, lines }, at) {
    if (this.columns === null) return;
    values.replaceChildren(...lines.map(([label, colour, name]) => {
      const column = this.columns[name];
      const value = at === null || at === undefined ? column.findLast((each) => each !== null) : column[at];
      const item = made("span", made("i", "", `swatch ${colour}`));
      item.append(`${label} ${value === null || value === undefined ? "–" : rounded(value)}`.trim());
      return item;
    }));
  }

  resize() {
    if (this.container.clientWidth === 0) return;
    for (const { figure, plot } of this.plots) plot.setSize({ width: this.widthIn(figure), height: HEIGHT });
  }

  show(columns) {
    if (columns === null) return;
    this.columns = columns;
    for (const chart of this.plots) {
      chart.plot.setData([columns.at, ...chart.lines.map(([, , name]) => columns[name])]);
      this.showValues(chart, chart.plot.cursor.idx);
    }
  }
}
