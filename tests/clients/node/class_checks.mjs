// Replicate's own client for Node against classes of one's own: what a class gives, called directly,
// is in the file PENSTOCK_CLIENTS_EXPECTED (tests/end_to_end/own_stack/test_classes_by_clients.py).
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import Replicate, { validateWebhook } from "replicate";
import { bodyOf, KEY, run, serving, URL_ } from "./checks.mjs";

const replicate = new Replicate({ auth: KEY, baseUrl: `${URL_}/v1` });
const expected = JSON.parse(readFileSync(process.env.PENSTOCK_CLIENTS_EXPECTED, "utf8"));
// The client makes files of https: and data: URIs only.
const textOf = async (file) =>
  typeof file === "string" ? (await fetch(file)).text() : (await file.blob()).text();

async function events(model, input) {
  const found = [];
  for await (const { event, data } of replicate.stream(`any/${model}`, { input }))
    found.push([event, data]);
  return found;
}

await run({
  "run with files in and out": async () => {
    const input = { ...expected.turned.input, file: Buffer.from(expected.turned.file) };
    input.parts = expected.turned.parts.map((part) => Buffer.from(part));
    const output = await replicate.run("any/turned", { input });
    assert.equal(await textOf(output.file), expected.turned.output.file);
    assert.deepEqual({ ...output, file: null }, { ...expected.turned.output, file: null });
  },
  "run of a generator of texts": async () => {
    const { input, output } = expected.pieces;
    assert.deepEqual(await replicate.run("any/pieces", { input }), output);
  },
  "run of a generator of files": async () => {
    const { input, output } = expected.pages;
    const files = await replicate.run("any/pages", { input });
    assert.deepEqual(await Promise.all(files.map(textOf)), output);
  },
  "stream of texts, with what was printed": async () => {
    const { input, output } = expected.pieces;
    const found = await events("pieces", input);
    const said = (kind) => found.filter(([event]) => event === kind).map(([, data]) => data);
    assert.equal(said("output").join(""), output.join(""));
    assert.ok(said("logs").join("").includes("begins"));
    assert.equal(found.at(-1)[0], "done");
  },
  "stream of files, each as it is made": async () => {
    const { input, output } = expected.pages;
    const found = await events("pages", input);
    const uris = found.filter(([event]) => event === "output").map(([, data]) => data);
    const loaded = await Promise.all(uris.map(async (uri) => (await fetch(uri)).text()));
    assert.deepEqual(loaded, output);
  },
  "prediction canceled": async () => {
    const input = { text: "a", forever: true };
    const created = await replicate.predictions.create({ model: "any/pieces", input });
    let now = created;
    while (!now.logs) now = await replicate.predictions.get(created.id);
    await replicate.predictions.cancel(created.id);
    const ended = await replicate.wait(created, { interval: 100 });
    assert.deepEqual([ended.status, ended.output], ["canceled", null]);
    assert.ok(ended.logs.includes("begins"));
  },
  "an error of the class, with its traceback": async () => {
    const input = { text: "fail" };
    const created = await replicate.predictions.create({ model: "any/pieces", input });
    await assert.rejects(replicate.wait(created, { interval: 100 }), /it does not want to/);
    const ended = await replicate.predictions.get(created.id);
    assert.deepEqual([ended.status, ended.error], ["failed", "it does not want to"]);
    assert.ok(ended.logs.includes("ValueError"));
  },
  "wrong input names the field": async () => {
    await assert.rejects(replicate.run("any/pieces", { input: { text: "" } }), (error) => {
      return error.response.status === 422 && error.message.includes("input.text");
    });
  },
  "webhook is called with the output": async () => {
    let received;
    const called = new Promise((resolve) => (received = resolve));
    await serving(
      async (request, reply) => {
        received({ headers: request.headers, body: await bodyOf(request) });
        reply.writeHead(204).end();
      },
      async (url) => {
        const { input, output } = expected.pieces;
        const hook = { webhook: `${url}/done`, webhook_events_filter: ["completed"] };
        await replicate.predictions.create({ model: "any/pieces", input, ...hook });
        const { headers, body } = await called;
        const { key } = await replicate.webhooks.default.secret.get();
        assert.equal(await validateWebhook({ headers, body }, key), true);
        assert.deepEqual(JSON.parse(body).output, output);
      },
    );
  },
});
