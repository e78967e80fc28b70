// A small pane for models that cannot chat: a completion, a similarity table, a ranking.

import { answer, call, events } from "./client.js";
import { element, made, table } from "./dom.js";

const MAX_TOKENS = 200;
const PANES = {
  completion: {
    title: "Try a completion", label: "A text to continue", button: "Continue", run: complete,
  },
  similarity: {
    title: "Try similarities", label: "Two or more texts, one per line", button: "Compare", run: compare,
  },
  ranking: {
    title: "Try a ranking", label: "A question, then one document per line", button: "Rank", run: rank,
  },
};
let running = null;
let pane = null;

// Shows the pane of that name, or hides it if the name is null.
export function startTry(name) {
  element("try").hidden = name === null;
  if (name === null || pane === PANES[name]) return;
  const listens = pane !== null;
  pane = PANES[name];
  element("try-title").textContent = pane.title;
  element("try-label").textContent = pane.label;
  element("try-send").textContent = pane.button;
  if (listens) return clear(); // the answer of another worker of the fleet
  element("try-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  element("try-stop").addEventListener("click", () => running?.abort());
}

function clear() {
  element("try-said").textContent = "";
  element("try-answer").replaceChildren();
}

async function send() {
  if (running !== null) return;
  running = new AbortController();
  element("try-send").disabled = true;
  element("try-stop").disabled = false;
  clear();
  try {
    element("try-said").textContent = await pane.run(element("try-text").value, running.signal);
  } catch (error) {
    element("try-said").textContent = error.name === "AbortError" ? "Stopped." : error.message;
  } finally {
    running = null;
    element("try-send").disabled = false;
    element("try-stop").disabled = true;
  }
}

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

async function complete(prompt, signal) {
  const body = { prompt, max_tokens: MAX_TOKENS, stream: true, stream_options: { include_usage: true } };
  const response = await call("v1/completions", { body, signal });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const shown = made("p", prompt, "plain");
  element("try-answer").append(shown);
  let said = "The answer ended too early.";
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    shown.append(chunk.choices[0]?.text ?? "");
    if (chunk.usage && chunk.timings) {
      said = `${chunk.usage.completion_tokens} tokens, ${chunk.timings.predicted_per_second.toFixed(1)} a second`;
    }
  }
  return said;
}

async function compare(text, signal) {
  const input = lines(text);
  if (input.length < 2) return "Enter at least two texts, one per line.";
  const { data } = await answer("v1/embeddings", { body: { input }, signal });
  const vectors = data.map(({ embedding }) => embedding);
  const size = (a) => Math.hypot(...a);
  const cosine = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0) / (size(a) * size(b) || 1);
  const rows = vectors.map((a, i) => [`${i + 1}. ${input[i]}`, ...vectors.map((b) => cosine(a, b).toFixed(3))]);
  element("try-answer").replaceChildren(table(["text", ...input.map((_, i) => `${i + 1}.`)], rows));
  return `${input.length} texts, vectors of ${vectors[0].length} numbers`;
}

async function rank(text, signal) {
  const [query, ...documents] = lines(text);
  if (documents.length === 0) return "Enter a question and at least one document, one per line.";
  const { results } = await answer("v1/rerank", { body: { query, documents }, signal });
  const rows = results.map(({ index, relevance_score: score }) => [score.toFixed(4), documents[index]]);
  element("try-answer").replaceChildren(table(["relevance", "document"], rows));
  return `${documents.length} documents`;
}
