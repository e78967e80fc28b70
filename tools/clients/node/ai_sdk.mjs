// Vercel's AI SDK with the providers that users configure for their own server.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { assert, register } from "./actions.mjs";

const PROMPT = "What is the capital of France?";
const Person = z.object({ name: z.string(), age: z.number().int().min(0).max(130) });
const PROVIDERS = {
  "openai (responses)": (server) =>
    createOpenAI({ baseURL: server.v1, apiKey: "any" })(server.model),
  "openai (chat)": (server) =>
    createOpenAI({ baseURL: server.v1, apiKey: "any" }).chat(server.model),
  "openai-compatible": (server) =>
    createOpenAICompatible({
      name: "local",
      baseURL: server.v1,
      supportsStructuredOutputs: true,
    })(server.model),
  anthropic: (server) => createAnthropic({ baseURL: server.v1, apiKey: "any" })(server.model),
};
// Not Anthropic: for models that it does not know, its provider emulates schemas by tools.
const FORMS = ["openai (responses)", "openai (chat)", "openai-compatible"];

register("ai-sdk", "openai (responses): a custom tool gets its text", "bundled", async (server) => {
  const openai = createOpenAI({ baseURL: server.v1, apiKey: "any" });
  const format = { type: "grammar", syntax: "regex", definition: "[a-z]{1,9}" };
  const { toolCalls } = await generateText({
    model: openai(server.model),
    prompt: PROMPT,
    maxRetries: 0,
    tools: { say: openai.tools.customTool({ description: "Say a word", format }) },
    toolChoice: "required",
  });
  assert(/^[a-z]{1,9}$/.test(toolCalls[0].input), toolCalls);
});

for (const [provider, modelOf] of Object.entries(PROVIDERS)) {
  const common = (server) => ({
    model: modelOf(server),
    prompt: PROMPT,
    maxRetries: 0,
    providerOptions: { openai: { store: false } }, // otherwise later steps refer to items that OpenAI stored
  });

  register("ai-sdk", `${provider}: generateText`, "instruct", async (server) => {
    const { text, usage } = await generateText({ ...common(server), maxOutputTokens: 16 });
    assert(text && usage.outputTokens > 0, { text, usage });
  });

  register("ai-sdk", `${provider}: streamText`, "instruct", async (server) => {
    let failed = null;
    const onError = ({ error }) => (failed = error);
    const { textStream } = streamText({ ...common(server), maxOutputTokens: 16, onError });
    let text = "";
    for await (const part of textStream) text += part;
    assert(text && failed === null, String(failed));
  });

  register("ai-sdk", `${provider}: a tool is run, and its result sent back`, "bundled", async (server) => {
    let asked;
    const weather = tool({
      description: "Weather of a city",
      inputSchema: z.object({ city: z.string() }),
      execute: async (given) => {
        asked = given;
        return "clear";
      },
    });
    const { steps } = await generateText({
      ...common(server),
      tools: { weather },
      toolChoice: "required",
      stopWhen: stepCountIs(2),
      maxOutputTokens: 120,
    });
    assert("city" in asked && steps.length === 2, { asked, steps });
  });

  if (FORMS.includes(provider)) {
    register("ai-sdk", `${provider}: an object by a zod schema`, "bundled", async (server) => {
      const { output } = await generateText({
        ...common(server),
        output: Output.object({ schema: Person }),
        maxOutputTokens: 200,
      });
      assert(output.age >= 0 && output.age <= 130, output);
    });
  }
}
