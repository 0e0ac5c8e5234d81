// The same request for a shell, Python and JavaScript. The key is read from the environment.

import { base } from "./api.js";
import { copyButton, h } from "./dom.js";

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

/** The request for Replicate's Python client. */
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

/** The request for Replicate's JavaScript client. */
export function javascriptOf({ version, input }) {
  return [
    'import Replicate from "replicate";',
    "",
    "const replicate = new Replicate({",
    "  auth: process.env.PENSTOCK_API_KEY,",
    `  baseUrl: ${JSON.stringify(new URL("v1", base).href)},`,
    "});",
    `const output = await replicate.run(${JSON.stringify(`any/${version}`)}, {`,
    `  input: ${indented(input, "  ")},`,
    "});",
    "console.log(output);",
  ].join("\n");
}

const indented = (value, by) => JSON.stringify(value, null, 2).replaceAll("\n", `\n${by}`);

/** A prediction's input as the body of a chat. */
const chatBody = ({ version, input }) => ({ model: version, ...input });

function chatCurl(body) {
  return [
    `curl ${quoted(new URL("v1/chat/completions", base).href)} \\`,
    '  -H "Authorization: Bearer $PENSTOCK_API_KEY" \\',
    "  -H 'Content-Type: application/json' \\",
    `  -d ${quoted(JSON.stringify(chatBody(body)))}`,
  ].join("\n");
}

function chatPython(body) {
  const options = Object.entries(chatBody(body)).map(([name, value]) => `    ${name}=${literal(value)},`);
  return [
    "import os",
    "from openai import OpenAI",
    "",
    "client = OpenAI(",
    '    api_key=os.environ["PENSTOCK_API_KEY"],',
    `    base_url=${JSON.stringify(new URL("v1", base).href)},`,
    ")",
    "answer = client.chat.completions.create(",
    ...options,
    ")",
    "print(answer.choices[0].message.content)",
  ].join("\n");
}

function chatJavascript(body) {
  return [
    'import OpenAI from "openai";',
    "",
    "const client = new OpenAI({",
    "  apiKey: process.env.PENSTOCK_API_KEY,",
    `  baseURL: ${JSON.stringify(new URL("v1", base).href)},`,
    "});",
    `const answer = await client.chat.completions.create(${indented(chatBody(body), "")});`,
    "console.log(answer.choices[0].message.content);",
  ].join("\n");
}

/** A prediction as code, for Replicate's clients. */
export const snippets = (body) =>
  offered({ curl: curlOf(body), Python: pythonOf(body), JavaScript: javascriptOf(body) });

/** A chat as code, for OpenAI's clients. */
export const chatSnippets = (body) =>
  offered({ curl: chatCurl(body), Python: chatPython(body), JavaScript: chatJavascript(body) });

/** Code by language, each with a button that copies it. */
function offered(codes) {
  const one = ([name, text]) => {
    const code = h("pre", { class: "code", tabindex: 0, "aria-label": `${name} code` }, text);
    const copy = copyButton(`Copy ${name}`, `The ${name} request`, text, code);
    return h("div", { class: "snippet" }, h("div", { class: "row between" }, h("h3", {}, name), copy), code);
  };
  return h(
    "details",
    { class: "card" },
    h("summary", {}, "This request as code"),
    h("p", { class: "hint" }, "The key is read from the environment variable PENSTOCK_API_KEY."),
    Object.entries(codes).map(one),
  );
}
