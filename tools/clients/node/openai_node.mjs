// The official OpenAI client for Node.
import OpenAI from "openai";
import { zodResponseFormat, zodFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { CITY, USER, assert, register } from "./actions.mjs";

const NAME = "openai-node";
const Person = z.object({ name: z.string(), age: z.number().int().min(0).max(130) });
const WEATHER = {
  type: "function",
  function: { name: "get_weather", description: "Weather of a city", parameters: CITY },
};

function client(server) {
  return new OpenAI({ baseURL: server.v1, apiKey: "any", maxRetries: 0 });
}

function body(server, fields) {
  return { model: server.model, messages: USER, max_tokens: 12, ...fields };
}

register(NAME, "chat", "instruct", async (server) => {
  const answer = await client(server).chat.completions.create(body(server));
  assert(answer.choices[0].message.content !== null, answer);
});

register(NAME, "chat: streamed with usage", "instruct", async (server) => {
  const fields = { stream: true, stream_options: { include_usage: true } };
  const stream = await client(server).chat.completions.create(body(server, fields));
  let text = "";
  let last;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    last = chunk;
  }
  assert(text && last.usage.completion_tokens > 0, last);
});

register(NAME, "chat: stream helper", "instruct", async (server) => {
  const stream = client(server).chat.completions.stream(body(server));
  const final = await stream.finalChatCompletion();
  assert(final.choices[0].message.content, final);
});

register(NAME, "chat: a zod schema parsed", "bundled", async (server) => {
  const answer = await client(server).chat.completions.parse(
    body(server, { response_format: zodResponseFormat(Person, "person"), max_tokens: 200 }),
  );
  const person = answer.choices[0].message.parsed;
  assert(person.age >= 0 && person.age <= 130, answer);
});

register(NAME, "chat: a forced tool", "bundled", async (server) => {
  const fields = { tools: [WEATHER], tool_choice: "required", max_tokens: 120 };
  const answer = await client(server).chat.completions.create(body(server, fields));
  const [call] = answer.choices[0].message.tool_calls;
  assert("city" in JSON.parse(call.function.arguments), answer);
});

register(NAME, "chat: zod tools run by runTools", "bundled", async (server) => {
  let asked;
  const tool = {
    type: "function",
    function: {
      name: "get_weather",
      description: "Weather of a city",
      parameters: CITY,
      parse: JSON.parse,
      function: (given) => {
        asked = given;
        return "clear";
      },
    },
  };
  const choice = { type: "function", function: { name: "get_weather" } };
  const runner = client(server).chat.completions.runTools(
    body(server, { tools: [tool], tool_choice: choice, max_tokens: 120 }),
  );
  await runner.done();
  assert("city" in asked, asked);
});

register(NAME, "chat: a zod function parsed", "bundled", async (server) => {
  const tool = zodFunction({ name: "person", parameters: Person });
  const answer = await client(server).chat.completions.parse(
    body(server, { tools: [tool], tool_choice: "required", max_tokens: 200 }),
  );
  const [call] = answer.choices[0].message.tool_calls;
  assert(call.function.parsed_arguments.age >= 0, answer);
});

register(NAME, "responses", "instruct", async (server) => {
  const answer = await client(server).responses.create({
    model: server.model,
    input: "Hello",
    max_output_tokens: 16,
  });
  assert(answer.output_text, answer);
});

register(NAME, "responses: streamed", "instruct", async (server) => {
  const stream = await client(server).responses.create({
    model: server.model,
    input: "Hello",
    max_output_tokens: 16,
    stream: true,
  });
  const kinds = [];
  for await (const event of stream) kinds.push(event.type);
  assert(kinds[0] === "response.created" && kinds.includes("response.output_text.delta"), kinds);
});

register(NAME, "responses: a zod schema parsed", "bundled", async (server) => {
  const answer = await client(server).responses.parse({
    model: server.model,
    input: "Name a person",
    text: { format: zodTextFormat(Person, "person") },
    max_output_tokens: 200,
  });
  assert(answer.output_parsed.age >= 0, answer);
});

register(NAME, "completions", "instruct", async (server) => {
  const answer = await client(server).completions.create({
    model: server.model,
    prompt: "Once upon a time",
    max_tokens: 8,
  });
  assert(answer.choices[0].text, answer);
});

register(NAME, "models", "instruct", async (server) => {
  const names = [];
  for await (const model of client(server).models.list()) names.push(model.id);
  assert(names.includes(server.model), names);
});

register(NAME, "a bad request is an error of its class", "instruct", async (server) => {
  try {
    await client(server).chat.completions.create(body(server, { messages: [] }));
  } catch (error) {
    assert(error instanceof OpenAI.BadRequestError && error.param === "messages", error.message);
    return;
  }
  throw new Error("answered");
});
