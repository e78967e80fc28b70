// The API, as /openapi.json describes it for this worker: paths, fields with their limits, answers.

import { answer } from "./client.js";
import { element, made, table } from "./dom.js";
import { askForToken } from "./token.js";

const LIMITS = [
  ["minimum", "at least"], ["exclusiveMinimum", "more than"], ["maximum", "at most"], ["exclusiveMaximum", "less than"],
  ["minLength", "characters: at least"], ["maxLength", "characters: at most"], ["pattern", "matches"],
  ["minItems", "items: at least"], ["maxItems", "items: at most"],
];
// If two dialects have a type of the same name, the document names their modules.
const nameOf = (key) => key.split("__").toReversed().filter((word) => word !== "schema").slice(0, 2).join(" of ");

function anchor(address, text) {
  const there = made("a", text);
  there.href = address;
  return there;
}

function link(reference) {
  const key = reference.split("/").at(-1);
  return anchor(`#${key}`, nameOf(key));
}

// Texts and links that describe a value's type and limits.
function kind(schema) {
  const choices = schema.anyOf ?? schema.oneOf ?? schema.allOf;
  if (schema.$ref) return [link(schema.$ref)];
  if (choices) return choices.flatMap((each, i) => [...(i ? [" or "] : []), ...kind(each)]);
  if (schema.enum) return [schema.enum.map((each) => JSON.stringify(each)).join(" or ")];
  if (schema.const !== undefined) return [JSON.stringify(schema.const)];
  const limits = LIMITS.filter(([name]) => schema[name] !== undefined).map(([name, words]) => `${words} ${schema[name]}`);
  const said = limits.length ? ` (${limits.join(", ")})` : "";
  if (schema.type === "array") return ["list of ", ...kind(schema.items ?? {}), said];
  return [`${schema.type ?? "anything"}${said}`];
}

function described(type, { properties, required = [], description = "", ...schema }) {
  if (!properties) return made("p", joined([...kind(schema), description && `: ${description}`]));
  const rows = Object.entries(properties).map(([name, field]) => {
    const notes = [field.description, required.includes(name) && "required", field.default != null && `default ${JSON.stringify(field.default)}`];
    return [made("code", name), joined(kind(field)), notes.filter(Boolean).join("; ")];
  });
  return scrolled(table(["field", "value", "notes"], rows), `Fields of ${type}`);
}

function scrolled(content, label) {
  const region = made("div", content, "wide");
  region.tabIndex = 0;
  region.role = "region";
  region.ariaLabel = label;
  return region;
}

function joined(contents) {
  const all = document.createDocumentFragment();
  all.append(...contents);
  return all;
}

function folded(summary, draw) {
  const details = document.createElement("details");
  details.append(made("summary", summary));
  details.addEventListener("toggle", () => { if (details.children.length === 1) details.append(...draw()); });
  return details;
}

// Paths with the same description are one entry.
function operations(paths) {
  const found = new Map();
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const key = JSON.stringify([method, operation.summary, operation.requestBody, operation.externalDocs, operation.parameters]);
      const entry = found.get(key) ?? { method, operation, paths: [] };
      entry.paths.push(path);
      found.set(key, entry);
    }
  }
  return [...found.values()];
}

// The parameters and headers of a request, and the headers of its answers.
function beside(parameters, responses, components) {
  const found = (place, { $ref, ...given }) => ($ref ? components[place][$ref.split("/").at(-1)] : given);
  const headers = Object.assign({}, ...Object.values(responses).map((each) => each.headers ?? {}));
  return [
    ...parameters.map((each) => found("parameters", each)),
    ...Object.entries(headers).map(([name, each]) => ({ name, in: "answer's header", ...found("headers", each) })),
  ].map(({ name, in: place, schema, description = "" }) => [made("code", name), place, joined(kind(schema)), description]);
}

function operation({ method, operation: { summary, parameters = [], requestBody, responses, externalDocs }, paths }, components) {
  const title = joined([made("code", `${method.toUpperCase()} ${paths.join(", ")}`), ` ${summary}`]);
  return folded(title, () => {
    const answers = Object.entries(responses).map(([code, { description, content }]) => [
      code, description,
      joined(Object.entries(content).flatMap(([type, { schema }], i) => [i ? ", " : "", `${type}: `, ...kind(schema)])),
    ]);
    const body = requestBody && Object.values(requestBody.content)[0].schema;
    const parts = [];
    if (externalDocs) parts.push(made("p", joined(["Described at ", anchor(externalDocs.url, externalDocs.url), "."])));
    if (body) parts.push(made("p", joined(["Body: ", ...kind(body)])));
    const rows = beside(parameters, responses, components);
    if (rows.length) parts.push(scrolled(table(["name", "place", "value", "notes"], rows), `Parameters and headers of ${method} ${paths[0]}`));
    return [...parts, scrolled(table(["status", "when", "body"], answers), `Answers of ${method} ${paths[0]}`)];
  });
}

async function show() {
  try {
    const { paths, components, info } = await answer("../openapi.json");
    element("docs-text").textContent = `Version ${info.version}. The requests that this worker accepts, with its own limits, and its answers.`;
    element("operations").replaceChildren(...operations(paths).map((each) => operation(each, components)));
    element("types").replaceChildren(...Object.entries(components.schemas).map(([key, schema]) => {
      const details = folded(nameOf(key), () => [described(nameOf(key), schema)]);
      details.id = key;
      return details;
    }));
    element("described").hidden = false; // in one go, so that the layout does not jump
    unfold();
  } catch (error) {
    element("docs-text").textContent = error.message;
  }
}

// A link to a type opens it.
function unfold() {
  const target = element(decodeURIComponent(location.hash.slice(1)));
  if (target?.tagName !== "DETAILS") return;
  target.open = true;
  target.scrollIntoView();
}

askForToken(show);
addEventListener("hashchange", unfold);
show();
