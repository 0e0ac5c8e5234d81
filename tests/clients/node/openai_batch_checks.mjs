// OpenAI's own client for Node: files, batches and what an organization used.
import assert from "node:assert/strict";
import { setTimeout } from "node:timers/promises";
import OpenAI, { toFile } from "openai";
import { assertSame, EMBEDDER, fresh, KEY, LIMIT_MS, Skip, URL_, vectors } from "./checks.mjs";

const POLL_MS = 250;
const OPEN = ["validating", "in_progress", "finalizing", "cancelling"];

function lineOf(number, input, fields = {}) {
  const body = { model: EMBEDDER, input, ...fields };
  return { custom_id: `line-${number}`, method: "POST", url: "/v1/embeddings", body };
}

// What `find` gives once it gives anything.
async function polled(find) {
  const until = Date.now() + LIMIT_MS;
  while (Date.now() < until) {
    const found = await find();
    if (found) return found;
    await setTimeout(POLL_MS);
  }
  throw new Error(`nothing after ${LIMIT_MS} ms`);
}

export function batchChecks(client) {
  async function batchOf(lines) {
    const data = lines.map((line) => JSON.stringify(line)).join("\n");
    const file = await client.files.create({
      file: await toFile(Buffer.from(data), "lines.jsonl"),
      purpose: "batch",
    });
    const created = await client.batches.create({
      input_file_id: file.id,
      endpoint: "/v1/embeddings",
      completion_window: "24h",
    });
    return { file, created };
  }

  const ended = (id) =>
    polled(async () => {
      const batch = await client.batches.retrieve(id);
      return OPEN.includes(batch.status) ? undefined : batch;
    });

  async function answersOf(fileId) {
    if (!fileId) return [];
    const text = await (await client.files.content(fileId)).text();
    return text.trim().split("\n").map(JSON.parse);
  }

  return {
    "batch of a file": async () => {
      const texts = fresh(5);
      const { file, created } = await batchOf(texts.map((text, number) => lineOf(number, text)));
      const listed = [];
      for await (const one of client.batches.list()) listed.push(one.id);
      assert.ok(listed.includes(created.id));
      const done = await ended(created.id);
      assert.equal(done.status, "completed");
      assert.deepEqual(done.request_counts, { total: 5, completed: 5, failed: 0 });
      const answers = await answersOf(done.output_file_id);
      assert.deepEqual(
        answers.map((one) => one.custom_id),
        texts.map((_, number) => `line-${number}`),
      );
      assertSame(
        answers.map((one) => one.response.body.data[0].embedding),
        await vectors(texts),
      );
      assert.ok((await client.files.delete(file.id)).deleted);
      await assert.rejects(client.files.retrieve(file.id), OpenAI.NotFoundError);
    },
    "batch with a wrong line fails and names it": async () => {
      const lines = [lineOf(0, "a"), lineOf(1, "b", { dimensions: 100_000 })];
      const { created } = await batchOf(lines);
      const failed = await ended(created.id);
      assert.equal(failed.status, "failed");
      assert.deepEqual(
        failed.errors.data.map((error) => [error.line, error.param]),
        [[2, "body.dimensions"]],
      );
    },
    "batch is canceled": async () => {
      const { created } = await batchOf(fresh(500).map((text, number) => lineOf(number, text)));
      await client.batches.cancel(created.id);
      const over = await ended(created.id);
      assert.ok(["cancelled", "completed"].includes(over.status), over.status);
    },
    "usage of the organization": async () => {
      if (!client.admin) throw new Skip("this version has no usage API");
      const began = Math.floor(Date.now() / 1000);
      const { usage } = await client.embeddings.create({ model: EMBEDDER, input: fresh(2) });
      const accountant = new OpenAI({ baseURL: `${URL_}/v1`, adminAPIKey: KEY });
      const asked = { start_time: began, bucket_width: "1m", group_by: ["model"] };
      await polled(async () => {
        const page = await accountant.admin.organization.usage.embeddings(asked);
        const results = page.data.flatMap((bucket) => bucket.results);
        const ours = results.filter((one) => one.model === EMBEDDER);
        // Each text's row arrives separately, and rows of the canceled batch may arrive first.
        return ours.reduce((sum, one) => sum + one.input_tokens, 0) >= usage.total_tokens;
      });
      const costs = await accountant.admin.organization.usage.costs({
        start_time: began - (began % 86_400),
      });
      const amounts = costs.data.flatMap((bucket) => bucket.results.map((one) => one.amount.value));
      assert.ok(amounts.reduce((sum, one) => sum + one, 0) > 0);
    },
  };
}
