// The request on screen as a shell command and as a Python program.

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function python(value, indent = "    ") {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map((each) => python(each, indent)).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${python(each, indent)}`).join(", ")}}`;
  return JSON.stringify(value);
}

export function curl(url, body, withToken) {
  const token = withToken ? `  -H "Authorization: Bearer $LLORCH_WORKER_TOKEN" \\\n` : "";
  return `curl -N ${quoted(url)} \\\n${token}  -H 'Content-Type: application/json' \\\n  -d ${quoted(JSON.stringify(body))}`;
}

export function openai(base, path, body, withToken) {
  const method = path.endsWith("chat/completions") ? "chat.completions" : "completions";
  const own = ["top_k", "min_p"];
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => own.includes(name)));
  const fields = Object.entries(body).filter(([name]) => !own.includes(name));
  if (Object.keys(extra).length > 0) fields.push(["extra_body", extra]);
  const lines = fields.map(([name, value]) => `    ${name}=${python(value)},`).join("\n");
  const piece = method === "completions" ? "chunk.choices[0].text" : "chunk.choices[0].delta.content";
  const key = withToken ? `os.environ["LLORCH_WORKER_TOKEN"]` : `"any"`;
  return `${withToken ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${key})
stream = client.${method}.create(
${lines}
)
for chunk in stream:
    if chunk.choices:
        print(${piece} or "", end="", flush=True)
`;
}
