// OpenAI's own client for Node: embeddings, images, models, errors, timeouts, retries.
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { batchChecks } from "./openai_batch_checks.mjs";
import OpenAI, { toFile } from "openai";
import {
  assertPng,
  assertSame,
  EMBEDDER,
  fresh,
  KEY,
  LIMIT_MS,
  needsKeys,
  PAINTER,
  post,
  PROMPT,
  relayThatLosesTheFirstAnswer,
  run,
  TOO_LONG,
  URL_,
  vectors,
  WRONG_KEY,
} from "./checks.mjs";

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: KEY, timeout: LIMIT_MS });
const slow = { model: PAINTER, prompt: PROMPT, size: "256x256", num_inference_steps: 100 };
const embedded = (answer) => answer.data.map((item) => item.embedding);
const images = (answer) => answer.data.map((item) => Buffer.from(item.b64_json, "base64"));

await run({
  ...batchChecks(client),
  "one text": async () => {
    const [text] = fresh(1);
    const answer = await client.embeddings.create({ model: EMBEDDER, input: text });
    assertSame(embedded(answer), await vectors([text]));
    assert.ok(answer.usage.total_tokens > 10);
  },
  "list of texts in order": async () => {
    const texts = fresh(40);
    assertSame(
      embedded(await client.embeddings.create({ model: EMBEDDER, input: texts })),
      await vectors(texts),
    );
  },
  "fewer dimensions": async () => {
    const texts = fresh();
    const answer = await client.embeddings.create({
      model: EMBEDDER,
      input: texts,
      dimensions: 64,
    });
    assertSame(embedded(answer), await vectors(texts, { dimensions: 64 }));
  },
  "encoding format float": async () => {
    const texts = fresh();
    const answer = await client.embeddings.create({
      model: EMBEDDER,
      input: texts,
      encoding_format: "float",
    });
    assertSame(embedded(answer), await vectors(texts));
  },
  "encoding format base64": async () => {
    const texts = fresh();
    const answer = await client.embeddings.create({
      model: EMBEDDER,
      input: texts,
      encoding_format: "base64",
    });
    const floats = embedded(answer).map((coded) => {
      const bytes = Uint8Array.from(Buffer.from(coded, "base64"));
      return Array.from(new Float32Array(bytes.buffer));
    });
    assertSame(floats, await vectors(texts));
  },
  "image of a seed": async () => {
    const asked = { model: PAINTER, prompt: PROMPT, size: "64x64" };
    const drawn = images(
      await client.images.generate({ ...asked, n: 2, response_format: "b64_json", seed: 5 }),
    );
    drawn.forEach(assertPng);
    const raw = await post("/v1/images/generations", { ...asked, seed: 6 });
    assert.equal(drawn.length, 2);
    assert.equal(drawn[1].toString("base64"), raw.data[0].b64_json);
  },
  "image edited": async () => {
    const circle = images(
      await client.images.generate({ model: PAINTER, prompt: PROMPT, size: "64x64" }),
    )[0];
    const image = await toFile(circle, "circle.png", { type: "image/png" });
    const prompt = "a large blue circle on a white background";
    const answer = await client.images.edit({ model: PAINTER, image, prompt, strength: 0.6 });
    images(answer).forEach(assertPng);
  },
  "image streamed while it is drawn": async () => {
    const stream = await client.images.generate({ ...slow, stream: true, partial_images: 2 });
    const events = [];
    for await (const event of stream) events.push(event);
    for (const event of events) assertPng(Buffer.from(event.b64_json, "base64"));
    const kind = "image_generation";
    assert.deepEqual(
      events.map((event) => [event.type, event.partial_image_index]),
      [[`${kind}.partial_image`, 0], [`${kind}.partial_image`, 1], [`${kind}.completed`, undefined]],
    );
    assert.equal(events[2].size, slow.size);
  },
  "models listed and found": async () => {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    assert.ok(names.includes(EMBEDDER) && names.includes(PAINTER));
    assert.equal((await client.models.retrieve(EMBEDDER)).id, EMBEDDER);
  },
  "wrong key is refused": async () => {
    await needsKeys();
    const stranger = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: WRONG_KEY });
    await assert.rejects(
      stranger.embeddings.create({ model: EMBEDDER, input: "a" }),
      OpenAI.AuthenticationError,
    );
  },
  "unknown model is told": async () => {
    await assert.rejects(
      client.embeddings.create({ model: "no-such-model", input: "a" }),
      (error) => {
        assert.ok(error instanceof OpenAI.NotFoundError);
        assert.deepEqual([error.code, error.param], ["model_not_found", "model"]);
        return true;
      },
    );
  },
  "too long text is refused or cut": async () => {
    await assert.rejects(
      client.embeddings.create({ model: EMBEDDER, input: TOO_LONG }),
      (error) => {
        assert.ok(error instanceof OpenAI.BadRequestError);
        return error.code === "context_length_exceeded";
      },
    );
    const answer = await client.embeddings.create({
      model: EMBEDDER,
      input: TOO_LONG,
      truncate: "end",
    });
    assertSame(embedded(answer), await vectors([TOO_LONG], { truncate: "end" }));
  },
  "timeout of the client": async () => {
    const asking = client.images.generate(slow, { timeout: 200, maxRetries: 0 });
    await assert.rejects(asking, OpenAI.APIConnectionTimeoutError);
  },
  "deadline is told at once or when it passed": async () => {
    const headers = { "X-Penstock-Deadline-Ms": "300" };
    await assert.rejects(client.images.generate(slow, { headers, maxRetries: 0 }), (error) => {
      if (error.status === 429) return Number(error.headers.get("retry-after")) > 0;
      return error.code === "deadline_exceeded" && error.headers.get("x-should-retry") === "false";
    });
  },
  "lost answer is asked for again and replayed": async () => {
    await relayThatLosesTheFirstAnswer(async (url) => {
      const headers = { "Idempotency-Key": randomUUID() };
      const { data, response } = await client
        .withOptions({ baseURL: `${url}/v1` })
        .images.generate({ model: PAINTER, prompt: PROMPT, size: "64x64" }, { headers })
        .withResponse();
      assert.equal(response.headers.get("idempotent-replayed"), "true");
      images(data).forEach(assertPng);
    });
  },
  "headers of the response": async () => {
    const [text] = fresh(1);
    const asked = { model: EMBEDDER, input: text };
    const first = await client.embeddings.create(asked).withResponse();
    const second = await client.embeddings.create(asked).withResponse();
    const caches = [first, second].map(({ response }) => response.headers.get("x-penstock-cache"));
    assert.deepEqual(caches, ["miss", "hit"]);
    assert.equal(first.data._request_id, first.response.headers.get("x-request-id"));
  },
  "many at once": async () => {
    const texts = fresh(24);
    const answers = await Promise.all(
      texts.map((input) => client.embeddings.create({ model: EMBEDDER, input })),
    );
    assertSame(
      answers.map((answer) => embedded(answer)[0]),
      await vectors(texts),
    );
  },
});
