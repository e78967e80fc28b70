// The playground: a chat or a raw completion, streamed, with everything that a request may carry.

import { call, errorOf, events, hasToken } from "./client.js";
import { render } from "./markdown.js";
import { curl, openai } from "./snippets.js";
import { append, fromCompletion } from "./tokens.js";

const element = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];
const messages = [];
let running = null;

export function startPlayground() {
  element("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  element("stop").addEventListener("click", () => running?.abort());
  element("clear").addEventListener("click", () => {
    messages.length = 0;
    element("conversation").replaceChildren();
    element("usage").textContent = "";
    showSnippets();
  });
  element("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) element("ask").requestSubmit();
  });
  for (const id of ["settings", "ask"]) element(id).addEventListener("input", showSnippets);
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", () => copy(element(`snippet-${button.dataset.copy}`)));
  }
  element("settings").addEventListener("submit", (event) => event.preventDefault());
  element("settings-fold").open = matchMedia("(min-width: 60rem)").matches;
  showSnippets();
}

const isChat = () => document.querySelector("[name=mode]:checked").value === "chat";
const path = () => isChat() ? "v1/chat/completions" : "v1/completions";

// The body of the next request; throws a SyntaxError that names the field whose JSON is wrong.
function bodyOf(prompt) {
  const body = { model: "default", stream: true, stream_options: { include_usage: true } };
  if (isChat()) {
    const system = element("system").value.trim();
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...messages, { role: "user", content: prompt }];
    if (element("colour").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    const schema = jsonOf("schema", "The JSON schema");
    if (schema !== undefined) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    const tools = jsonOf("tools", "The list of tools");
    if (tools !== undefined) body.tools = tools;
  } else {
    body.prompt = prompt;
    if (element("colour").checked) body.logprobs = 5;
  }
  for (const name of NUMBERS) {
    const value = element(name).value;
    if (value !== "") body[name] = Number(value);
  }
  return body;
}

function jsonOf(id, what) {
  const text = element(id).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${what} is not JSON: ${error.message}`);
  }
}

function showSnippets() {
  try {
    const body = bodyOf(element("prompt").value || "Hello");
    const base = new URL("v1", location.href).href;
    element("snippet-curl").textContent = curl(new URL(path(), location.href).href, body, hasToken());
    element("snippet-python").textContent = openai(base, path(), body, hasToken());
  } catch (error) {
    element("snippet-curl").textContent = element("snippet-python").textContent = error.message;
  }
}

// Browsers have a clipboard for secure origins only; elsewhere the text is marked, to be copied by hand.
function copy(snippet) {
  getSelection().selectAllChildren(snippet);
  navigator.clipboard?.writeText(snippet.textContent);
}

function article(role) {
  const block = document.createElement("article");
  block.className = role;
  const title = document.createElement("h3");
  title.textContent = role;
  block.append(title);
  element("conversation").append(block);
  return block;
}

function part(block, tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  block.append(made);
  return made;
}

// What has come of one answer so far, and the places on the page where it is shown.
class Answer {
  constructor() {
    this.text = "";
    this.calls = [];
    this.coloured = element("colour").checked;
    this.block = article(isChat() ? "assistant" : "completion");
    this.reasoning = null;
    this.body = part(this.block, "div", this.coloured || !isChat() ? "plain" : "markdown");
    this.body.classList.add("waiting");
    this.callsView = null;
    this.due = false;
  }

  take(choice) {
    const delta = choice.delta ?? { content: choice.text };
    if (delta.content || delta.reasoning_content || delta.tool_calls) this.body.classList.remove("waiting");
    if (delta.reasoning_content) this.reason(delta.reasoning_content);
    if (delta.content) {
      this.text += delta.content;
      if (!this.coloured) this.show();
    }
    if (this.coloured) append(this.body, choice.logprobs?.content ?? fromCompletion(choice.logprobs));
    for (const call of delta.tool_calls ?? []) this.takeCall(call);
  }

  reason(text) {
    if (this.reasoning === null) {
      const details = document.createElement("details");
      const summary = document.createElement("summary");
      summary.textContent = "reasoning";
      details.append(summary);
      this.block.insertBefore(details, this.body);
      this.reasoning = part(details, "div", "plain");
    }
    this.reasoning.append(text);
  }

  takeCall({ index, id, function: called }) {
    const call = this.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
    call.function.name += called?.name ?? "";
    call.function.arguments += called?.arguments ?? "";
    this.callsView ??= part(this.block, "pre", "calls");
    this.callsView.textContent = this.calls.map((each) => `${each.function.name}(${each.function.arguments})`).join("\n");
  }

  // At most once a frame: a fast stream must not parse its whole text for every token.
  show() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      if (isChat()) render(this.body, this.text);
      else this.body.textContent = this.text;
    });
  }

  get message() {
    const message = { role: "assistant", content: this.text };
    if (this.calls.length > 0) message.tool_calls = this.calls;
    return message;
  }
}

async function send() {
  const prompt = element("prompt").value;
  if (running !== null || !prompt) return;
  let body;
  try {
    body = bodyOf(prompt);
  } catch (error) {
    part(article("error"), "div", "error", error.message);
    return;
  }
  part(article(isChat() ? "user" : "prompt"), "div", "plain", prompt);
  const answer = new Answer();
  busy(new AbortController());
  const began = performance.now();
  let first = null;
  try {
    const response = await call(path(), { body, signal: running.signal });
    if (!response.ok) throw await errorOf(response);
    let usage = null, ended = null;
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      first ??= performance.now();
      const [choice] = chunk.choices;
      if (choice) { answer.take(choice); ended = choice.finish_reason ?? ended; }
      usage = chunk.usage ?? usage;
    }
    showUsage(usage, ended, began, first);
  } catch (error) {
    if (error.name === "AbortError") element("usage").textContent = "stopped";
    else part(answer.block, "div", "error", error.message);
  } finally {
    answer.body.classList.remove("waiting");
    busy(null);
  }
  if (isChat() && (answer.text || answer.calls.length > 0)) messages.push({ role: "user", content: prompt }, answer.message);
  element("prompt").value = "";
  showSnippets();
}

function busy(controller) {
  running = controller;
  element("stop").disabled = controller === null;
  element("send").disabled = controller !== null;
}

function showUsage(usage, ended, began, first) {
  const seconds = (performance.now() - (first ?? began)) / 1000;
  const later = (usage?.completion_tokens ?? 0) - 1; // the first one's time is the prompt's
  const rate = later > 0 && seconds > 0 ? `, then ${(later / seconds).toFixed(1)} tokens/s` : "";
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  element("usage").textContent = usage
    ? `${usage.prompt_tokens} prompt tokens (${cached} cached), ${usage.completion_tokens} out, first after ${Math.round((first ?? began) - began)} ms${rate}; ended: ${ended}`
    : `ended: ${ended}`;
}
