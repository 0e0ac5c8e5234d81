// Replicate's own client for Node: runs, predictions, streams, files, webhooks.
import assert from "node:assert/strict";
import Replicate, { validateWebhook } from "replicate";
import {
  assertPng,
  assertSame,
  bodyOf,
  EMBEDDER,
  fresh,
  KEY,
  needsKeys,
  needsSameMachine,
  PAINTER,
  PROMPT,
  run,
  serving,
  URL_,
  vectors,
  WRONG_KEY,
} from "./checks.mjs";

const replicate = new Replicate({ auth: KEY, baseUrl: `${URL_}/v1` });
const textRef = `any/${EMBEDDER}`,
  imageRef = `any/${PAINTER}`;
const small = { prompt: PROMPT, width: 64, height: 64 };
const slow = { prompt: PROMPT, width: 256, height: 256, num_inference_steps: 100 };
const bytesOf = async (file) => Buffer.from(await (await file.blob()).arrayBuffer());

await run({
  "run gives a vector": async () => {
    const [text] = fresh(1);
    assertSame([await replicate.run(textRef, { input: { text } })], await vectors([text]));
  },
  "run of texts gives vectors in order": async () => {
    const texts = fresh(10);
    assertSame(await replicate.run(textRef, { input: { texts } }), await vectors(texts));
  },
  "run gives images as files": async () => {
    const images = await replicate.run(imageRef, { input: { ...small, num_outputs: 2 } });
    assert.equal(images.length, 2);
    for (const image of images) assertPng(await bytesOf(image));
  },
  "run of a version, polled, with progress": async () => {
    const version = (await replicate.models.get("any", PAINTER)).latest_version.id;
    const seen = [];
    const options = { input: small, wait: { mode: "poll", interval: 100 } };
    const images = await replicate.run(`${imageRef}:${version}`, options, (made) =>
      seen.push(made.status),
    );
    assertPng(await bytesOf(images[0]));
    assert.equal(seen.at(-1), "succeeded");
  },
  "prediction created, waited for and read": async () => {
    const [text] = fresh(1);
    const created = await replicate.predictions.create({ model: textRef, input: { text } });
    const ended = await replicate.wait(created, { interval: 100 });
    assertSame([ended.output], await vectors([text]));
    assert.deepEqual((await replicate.predictions.get(created.id)).output, ended.output);
  },
  "prediction of a deployment": async () => {
    const [text] = fresh(1);
    const created = await replicate.deployments.predictions.create("any", EMBEDDER, {
      input: { text },
      wait: 30,
    });
    assertSame([created.output], await vectors([text]));
  },
  "prediction canceled": async () => {
    const created = await replicate.predictions.create({ model: imageRef, input: slow });
    await replicate.predictions.cancel(created.id);
    const ended = await replicate.wait(created, { interval: 100 });
    assert.deepEqual([ended.status, ended.output], ["canceled", null]);
  },
  "predictions listed newest first": async () => {
    const { id } = await replicate.predictions.create({
      model: textRef,
      input: { text: fresh(1)[0] },
    });
    for await (const page of replicate.paginate(replicate.predictions.list)) {
      assert.equal(page[0].id, id);
      break;
    }
  },
  "stream of events": async () => {
    // The client follows the signed link to the events without the key that it was given.
    const events = [];
    for await (const { event } of replicate.stream(textRef, { input: { texts: fresh(3) } }))
      events.push(event);
    assert.deepEqual(events.slice(-4), ["output", "output", "output", "done"]);
  },
  "file as input": async () => {
    const [circle] = await replicate.run(imageRef, { input: small });
    const image = await bytesOf(circle);
    const input = {
      prompt: "a large blue circle on a white background",
      image,
      prompt_strength: 0.6,
    };
    assertPng(await bytesOf((await replicate.run(imageRef, { input }))[0]));
  },
  "file uploaded and read": async () => {
    const made = await replicate.files.create(Buffer.from("any bytes"), { from: "a check" });
    assert.equal((await replicate.files.get(made.id)).size, 9);
  },
  "webhook is called and valid": async () => {
    needsSameMachine();
    let received;
    const called = new Promise((resolve) => (received = resolve));
    await serving(
      async (request, reply) => {
        received({ headers: request.headers, body: await bodyOf(request) });
        reply.writeHead(204).end();
      },
      async (url) => {
        const input = { text: fresh(1)[0] };
        const hook = { webhook: `${url}/done`, webhook_events_filter: ["completed"] };
        const created = await replicate.predictions.create({ model: textRef, input, ...hook });
        const { headers, body } = await called;
        const { key } = await replicate.webhooks.default.secret.get();
        assert.equal(await validateWebhook({ headers, body }, key), true);
        assert.equal(await validateWebhook({ headers, body: body + " " }, key), false);
        assert.ok(body.includes(created.id));
      },
    );
  },
  "models listed and found": async () => {
    const { results } = await replicate.models.list();
    const names = results.map((model) => model.name);
    assert.ok(names.includes(EMBEDDER) && names.includes(PAINTER));
    assert.equal((await replicate.deployments.get("any", EMBEDDER)).name, EMBEDDER);
  },
  "account, hardware and deployments": async () => {
    assert.ok((await replicate.accounts.current()).username);
    assert.ok((await replicate.hardware.list()).length > 0);
    const { results } = await replicate.deployments.list();
    assert.ok(results.some((deployment) => deployment.name === EMBEDDER));
  },
  "wrong input names the field": async () => {
    await assert.rejects(replicate.run(imageRef, { input: { seed: 1 } }), (error) => {
      return error.response.status === 422 && error.message.includes("input.prompt");
    });
  },
  "unknown model": async () => {
    const asking = replicate.run("any/no-such-model", { input: { text: "a" } });
    await assert.rejects(asking, (error) => error.response.status === 404);
  },
  "wrong key is refused": async () => {
    await needsKeys();
    const stranger = new Replicate({ auth: WRONG_KEY, baseUrl: `${URL_}/v1` });
    const asking = stranger.run(textRef, { input: { text: "a" } });
    await assert.rejects(asking, (error) => error.response.status === 401);
  },
});
