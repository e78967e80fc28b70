// The worker's HTTP interface as the page uses it. The token lives in this module's memory alone.

let token = null;
let askForToken = () => {};

export function useToken(value) { token = value; }
export function hasToken() { return token !== null; }
export function onUnauthorized(callback) { askForToken = callback; }

export class WorkerError extends Error {}

export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (token !== null) headers.authorization = `Bearer ${token}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers, signal, cache: "no-store",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (response.status === 401) askForToken();
  return response;
}

export async function json(path, options) {
  const response = await call(path, options);
  return { status: response.status, value: await response.json() };
}

// Yields the data of each server-sent event, as text.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart()).join("\n");
      if (data) yield data;
    }
  }
}

export async function errorOf(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return new WorkerError(body.error?.message ?? body.message ?? text);
  } catch {
    return new WorkerError(text || `HTTP ${response.status}`);
  }
}
