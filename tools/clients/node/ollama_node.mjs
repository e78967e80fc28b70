// Ollama's client for Node.
import { Ollama } from "ollama";
import { CITY, USER, assert, register } from "./actions.mjs";

const NAME = "ollama-node";
const SHORT = { num_predict: 12, temperature: 0 };
const WEATHER = {
  type: "function",
  function: { name: "get_weather", description: "Weather of a city", parameters: CITY },
};

function client(server) {
  return new Ollama({ host: server.url });
}

function body(server, fields) {
  return { model: server.model, messages: USER, options: SHORT, ...fields };
}

register(NAME, "list, show, ps", "instruct", async (server) => {
  const api = client(server);
  const [listed] = (await api.list()).models;
  const shown = await api.show({ model: listed.name });
  assert(shown.capabilities.includes("completion"), shown);
  assert((await api.ps()).models[0].name === listed.name, listed);
});

register(NAME, "chat", "instruct", async (server) => {
  const answer = await client(server).chat(body(server));
  assert(answer.message.content && answer.done && answer.eval_count > 0, answer);
});

register(NAME, "chat: streamed", "instruct", async (server) => {
  let text = "";
  let last;
  for await (const part of await client(server).chat(body(server, { stream: true }))) {
    text += part.message.content;
    last = part;
  }
  assert(text && last.done && last.total_duration > 0, last);
});

register(NAME, "chat: aborted", "instruct", async (server) => {
  const api = client(server);
  const stream = await api.chat(body(server, { stream: true, options: { num_predict: 400 } }));
  let fault;
  try {
    for await (const part of stream) {
      assert(part.message, part);
      api.abort();
    }
  } catch (error) {
    fault = error;
  }
  assert(fault?.name === "AbortError", String(fault));
});

register(NAME, "generate: streamed", "instruct", async (server) => {
  const fields = { model: server.model, prompt: "Once upon a time", stream: true, options: SHORT };
  let text = "";
  for await (const part of await client(server).generate(fields)) text += part.response;
  assert(text, "no text");
});

register(NAME, "chat: a schema", "bundled", async (server) => {
  const fields = { format: CITY, options: { num_predict: 200 } };
  const answer = await client(server).chat(body(server, fields));
  assert("city" in JSON.parse(answer.message.content), answer);
});

register(NAME, "chat: tools offered", "bundled", async (server) => {
  const answer = await client(server).chat(body(server, { tools: [WEATHER] }));
  assert(answer.message.content !== undefined, answer);
});

register(NAME, "embed: refused in words", "bundled", async (server) => {
  let fault;
  try {
    await client(server).embed({ model: server.model, input: "a" });
  } catch (error) {
    fault = error;
  }
  assert(fault?.status_code === 400 && fault.message.includes("embeddings"), String(fault));
});
