// Runs the actions of one model: node run.mjs URL MODEL [ONLY]
// Prints one JSON line per action, like run.py: client, name, and the error, if any.
import { register } from "./actions.mjs";
import "./openai_node.mjs";
import "./anthropic_node.mjs";
import "./ai_sdk.mjs";
import "./ollama_node.mjs";

const ACTION_MS = 60_000;
const [url, model, only = ""] = process.argv.slice(2);
const listed = await (await fetch(`${url}/v1/models`)).json();
const server = { url, v1: `${url}/v1`, model: listed.data[0].id };

function tooLong() {
  return new Promise((_, reject) => {
    setTimeout(() => reject(new Error("no end within 60 s")), ACTION_MS).unref();
  });
}

for (const action of register.actions) {
  if (action.model !== model || !`${action.client}: ${action.name}`.includes(only)) continue;
  const began = performance.now();
  let fault = null;
  try {
    await Promise.race([action.run(server), tooLong()]);
  } catch (error) {
    fault = `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, 300);
  }
  const seconds = Math.round((performance.now() - began) / 10) / 100;
  const { client, name } = action;
  console.log(JSON.stringify({ client, name, seconds, fault }));
}
process.exit(0);
