// Prometheus' text format into numbers, and quantiles out of the growth of a histogram.

export function parse(text) {
  const series = new Map();
  for (const line of text.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const at = line.lastIndexOf(" ");
    series.set(line.slice(0, at), Number(line.slice(at + 1)));
  }
  return series;
}

function buckets(series, name) {
  const start = `${name}_bucket{le="`;
  const found = [];
  for (const [key, count] of series) {
    if (key.startsWith(start)) {
      const edge = key.slice(start.length, key.indexOf('"', start.length));
      found.push([edge === "+Inf" ? Infinity : Number(edge), count]);
    }
  }
  return found.sort((a, b) => a[0] - b[0]);
}

// Of the observations between two scrapes, in the histogram's unit; null when there were none.
export function quantile(before, after, name, q) {
  const old = new Map(buckets(before, name));
  const grown = buckets(after, name).map(([edge, count]) => [edge, count - (old.get(edge) ?? 0)]);
  const total = grown.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  let below = 0, floor = 0;
  for (const [edge, count] of grown) {
    if (count >= q * total) {
      if (edge === Infinity) return floor;
      return floor + (edge - floor) * ((q * total - below) / Math.max(count - below, 1e-9));
    }
    [below, floor] = [count, edge];
  }
  return null;
}

export function growth(before, after, name) {
  return Math.max(0, (after.get(name) ?? 0) - (before.get(name) ?? 0));
}
