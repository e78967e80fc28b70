// The official Anthropic client for Node.
import Anthropic from "@anthropic-ai/sdk";
import { CITY, USER, assert, register } from "./actions.mjs";

const NAME = "anthropic-node";
const WEATHER = { name: "get_weather", description: "Weather of a city", input_schema: CITY };

function messages(server) {
  return new Anthropic({ baseURL: server.url, apiKey: "any", maxRetries: 0 }).messages;
}

function body(server, fields) {
  return { model: server.model, messages: USER, max_tokens: 12, ...fields };
}

register(NAME, "messages", "instruct", async (server) => {
  const answer = await messages(server).create(body(server, { system: "Be brief." }));
  assert(answer.type === "message" && answer.usage.input_tokens > 0, answer);
});

register(NAME, "messages: streamed", "instruct", async (server) => {
  const kinds = [];
  const stream = await messages(server).create(body(server, { stream: true }));
  for await (const event of stream) kinds.push(event.type);
  assert(kinds[0] === "message_start" && kinds.at(-1) === "message_stop", kinds);
});

register(NAME, "messages: stream helper", "instruct", async (server) => {
  const stream = messages(server).stream(body(server));
  let text = "";
  stream.on("text", (part) => (text += part));
  const final = await stream.finalMessage();
  assert(final.content[0].text === text, final);
});

register(NAME, "messages: a forced tool, whole and streamed", "bundled", async (server) => {
  const fields = { tools: [WEATHER], tool_choice: { type: "any" }, max_tokens: 120 };
  const answer = await messages(server).create(body(server, fields));
  const call = answer.content.find((block) => block.type === "tool_use");
  assert(answer.stop_reason === "tool_use" && "city" in call.input, answer);
  const final = await messages(server).stream(body(server, fields)).finalMessage();
  assert("city" in final.content.find((block) => block.type === "tool_use").input, final);
});

register(NAME, "messages: a tool's result", "bundled", async (server) => {
  const use = { type: "tool_use", id: "t1", name: "get_weather", input: { city: "Paris" } };
  const result = { type: "tool_result", tool_use_id: "t1", content: "clear" };
  const turns = [
    ...USER,
    { role: "assistant", content: [use] },
    { role: "user", content: [result] },
  ];
  const answer = await messages(server).create(body(server, { messages: turns, tools: [WEATHER] }));
  assert(answer.role === "assistant", answer);
});

register(NAME, "count_tokens", "instruct", async (server) => {
  const counted = await messages(server).countTokens({ model: server.model, messages: USER });
  assert(counted.input_tokens > 3, counted);
});
