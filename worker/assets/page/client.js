// The part of the worker's HTTP API that the page uses. Only this module's memory has the token.

let token = null;
let worker = null;
let askForToken = () => {};

export function useToken(value) { token = value; }
export function hasToken() { return token !== null; }
// The worker of a fleet that requests go to; null lets the gateway choose.
export function useWorker(id) { worker = id; }
export function onUnauthorized(callback) { askForToken = callback; }

// The answer to a request. Throws an Error with a sentence if there is none that can be used.
export async function call(path, { body, signal, anyone = false } = {}) {
  const headers = worker === null || anyone ? {} : { "x-llorch-worker": worker };
  const sent = token;
  if (sent !== null) headers.authorization = `Bearer ${sent}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers, signal, cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The worker does not answer: it has stopped, or the network connection is down.");
  }
  if (response.status === 401 && sent === token) askForToken(); // otherwise the user has entered another one meanwhile
  return response;
}

// The JSON of an answer with any status.
export async function json(path, options) {
  const response = await call(path, options);
  return { status: response.status, value: await response.json() };
}

// The JSON of an answer that is not an error.
export async function answer(path, options) {
  const { status, value } = await json(path, options);
  if (status >= 400) throw new Error(sentence(value.error?.message ?? value.message ?? `HTTP ${status}`));
  return value;
}

// Yields the data of each server-sent event as text. Throws an Error with a sentence if they end early.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("The connection to the worker was lost in the middle of the answer.");
    }
    if (read.done) return;
    held += read.value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart()).join("\n");
      if (data) yield data;
    }
  }
}

function sentence(text) {
  return `${text[0]?.toUpperCase() ?? ""}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;
}
