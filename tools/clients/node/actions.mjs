// The table of actions: register(client, name, model, run); `run` throws if the action fails.
export function register(client, name, model, run) {
  register.actions.push({ client, name, model, run });
}
register.actions = [];

export function assert(condition, what) {
  if (!condition) throw new Error(typeof what === "string" ? what : JSON.stringify(what));
}

export const USER = [{ role: "user", content: "What is the capital of France?" }];
export const CITY = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
};
