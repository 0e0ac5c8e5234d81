// Replicate's own client for Node against custom classes, one for each form of input and
// output: the counterpart of tests/clients/python/class_checks.py. What each class gives if it is
// called directly is in the file PENSTOCK_CLIENTS_EXPECTED (tests/workers/models/custom/forms).
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { isDeepStrictEqual } from "node:util";
import Replicate, { validateWebhook } from "replicate";
import { bodyOf, EXPECTED, KEY, run, serving, URL_ } from "./checks.mjs";

const replicate = new Replicate({ auth: KEY, baseUrl: `${URL_}/v1` });
const forms = EXPECTED ? JSON.parse(readFileSync(EXPECTED, "utf8")) : [];

function given({ input, files }) {
  const opened = Object.entries(files).map(([name, texts]) => [
    name,
    Array.isArray(texts) ? texts.map((text) => Buffer.from(text)) : Buffer.from(texts),
  ]);
  return { ...input, ...Object.fromEntries(opened) };
}

// An output with files as their texts.
async function plain(value) {
  if (Array.isArray(value)) return Promise.all(value.map(plain));
  if (value instanceof ReadableStream) return { file: await (await value.blob()).text() };
  if (typeof value === "string") {
    // The client makes files of https: and data: URIs only, and this API speaks plain HTTP.
    const isFile = value.startsWith("data:") || value.startsWith(`${URL_}/`);
    return isFile ? { file: await (await fetch(value)).text() } : value;
  }
  if (value === null || typeof value !== "object") return value;
  const parts = Object.entries(value).map(async ([name, one]) => [name, await plain(one)]);
  return Object.fromEntries(await Promise.all(parts));
}

async function element(data) {
  try {
    return await plain(JSON.parse(data));
  } catch {
    return plain(data);
  }
}

const checks = {
  run: async (form) => {
    const output = await replicate.run(`any/${form.model}`, { input: given(form) });
    assert.deepEqual(await plain(output), form.output);
  },
  stream: async (form) => {
    const events = [];
    const stream = replicate.stream(`any/${form.model}`, { input: given(form) });
    for await (const { event, data } of stream) events.push([event, data]);
    const said = (kind) => events.filter(([event]) => event === kind).map(([, data]) => data);
    assert.equal(events.at(-1)[0], "done");
    assert.equal(said("logs").join(""), "begins\n");
    // The API ends a line at U+2028 too, since clients in use do.
    const output = typeof form.output === "string" ? form.output.replace("\u2028", "\n") : form.output;
    // A list that was returned is one event, and elements of a generator are one each.
    const [first, ...others] = said("output");
    if (first !== undefined && others.length === 0) {
      const whole = await element(first);
      if (isDeepStrictEqual(whole, output)) return;
    }
    const elements = Array.isArray(output) ? output : output === null ? [] : [output];
    if (Array.isArray(output) && elements.every((one) => typeof one === "string")) {
      assert.equal(said("output").join(""), output.join(""));
      return;
    }
    assert.deepEqual(await Promise.all(said("output").map(element)), elements);
  },
  webhook: async (form) => {
    let received;
    const called = new Promise((resolve) => (received = resolve));
    await serving(
      async (request, reply) => {
        received({ headers: request.headers, body: await bodyOf(request) });
        reply.writeHead(204).end();
      },
      async (url) => {
        const hook = { webhook: `${url}/done`, webhook_events_filter: ["completed"] };
        const model = `any/${form.model}`;
        const { id } = await replicate.predictions.create({ model, input: given(form), ...hook });
        const { headers, body } = await called;
        const { key } = await replicate.webhooks.default.secret.get();
        assert.equal(await validateWebhook({ headers, body }, key), true);
        const told = JSON.parse(body);
        assert.deepEqual([told.id, told.status, told.logs], [id, "succeeded", "begins\n"]);
        assert.deepEqual(await plain(told.output), form.output);
      },
    );
  },
  cancel: async (form) => {
    const model = `any/${form.model}`;
    const input = { ...given(form), forever: true };
    const created = await replicate.predictions.create({ model, input });
    let now = created;
    // What a batch prints is shown with its results.
    const logs = form.model.includes("batches") ? "" : "begins\n";
    const until = Date.now() + 60_000;
    while (now.status !== "processing" || (now.logs ?? "") !== logs) {
      assert.ok(Date.now() < until, `${now.status}: ${now.logs}`);
      now = await replicate.predictions.get(created.id);
    }
    await replicate.predictions.cancel(created.id);
    const ended = await replicate.wait(created, { interval: 100 });
    assert.deepEqual([ended.status, ended.output], ["canceled", null]);
    assert.ok(ended.logs.startsWith(logs), ended.logs);
    assert.deepEqual(await plain(await replicate.run(model, { input: given(form) })), form.output);
  },
};

const all = forms.flatMap((form, number) =>
  Object.entries(checks)
    .filter(([name]) => {
      const isFirst = forms.findIndex(({ model }) => model === form.model) === number;
      return name !== "cancel" || isFirst;
    })
    .map(([name, check]) => [`${form.model} ${number}: ${name}`, () => check(form)]),
);

await run({
  ...Object.fromEntries(all),
  "an error of the class, with its traceback": async () => {
    const input = { text: "fail" };
    const created = await replicate.predictions.create({ model: "any/form-pieces", input });
    await assert.rejects(replicate.wait(created, { interval: 100 }), /it does not want to/);
    const ended = await replicate.predictions.get(created.id);
    assert.deepEqual([ended.status, ended.error], ["failed", "ValueError: it does not want to"]);
    assert.ok(ended.logs.includes("ValueError"));
  },
  "wrong input names the field": async () => {
    const wrong = [
      [{ text: "a" }, "text"],
      [{ text: "UPPER" }, "text"],
      [{}, "text"],
      [{ text: "any", other: 1 }, "other"],
    ];
    for (const [input, field] of wrong)
      await assert.rejects(replicate.run("any/form-text", { input }), (error) => {
        return error.response.status === 422 && error.message.includes(`input.${field}`);
      });
  },
});
