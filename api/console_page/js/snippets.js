// The same request for a shell and for Python. The key is read from the environment.

import { base } from "./api.js";
import { button, h, say } from "./dom.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The request for curl. */
export function curlOf(body) {
  return [
    `curl ${quoted(new URL("v1/predictions", base).href)} \\`,
    '  -H "Authorization: Bearer $PENSTOCK_API_KEY" \\',
    "  -H 'Content-Type: application/json' -H 'Prefer: wait=60' \\",
    `  -d ${quoted(JSON.stringify(body))}`,
  ].join("\n");
}

/** The request for Python. */
export function pythonOf({ version, input }) {
  return [
    "import os",
    "import replicate",
    "",
    "client = replicate.Client(",
    '    api_token=os.environ["PENSTOCK_API_KEY"],',
    `    base_url=${JSON.stringify(base.href.replace(/\/$/, ""))},`,
    ")",
    "prediction = client.predictions.create(",
    `    version=${JSON.stringify(version)},`,
    `    input=${literal(input)},`,
    "    wait=60,",
    ")",
    "print(prediction.output)",
  ].join("\n");
}

/** A value in Python. The escapes of strings in JSON are those of Python too. */
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  const pairs = Object.entries(value).map(
    ([name, one]) => `${JSON.stringify(name)}: ${literal(one)}`,
  );
  return `{${pairs.join(", ")}}`;
}

/** Both, each with a button that copies it. */
export function snippets(body) {
  const one = (name, text) => {
    const code = h("pre", { class: "code", tabindex: 0 }, text);
    const copy = button(
      `Copy ${name}`,
      async () => {
        await navigator.clipboard.writeText(text);
        say(`The ${name} request was copied.`);
      },
      { onError: () => select(code) },
    );
    return h("div", { class: "snippet" }, code, copy);
  };
  return h(
    "details",
    { class: "card" },
    h("summary", {}, "This request as code"),
    one("curl", curlOf(body)),
    one("Python", pythonOf(body)),
  );
}

/** Pages without TLS have no clipboard: the reader copies what is selected. */
function select(element) {
  getSelection().selectAllChildren(element);
  say("Selected. Copy it with the keyboard.");
}
