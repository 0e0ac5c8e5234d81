// Google's Pub/Sub client for Node against the embedded Pub/Sub: ordering keys, seeks, the order of
// a publish's answer and its message, and schemas of protocol buffers.
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { Encodings, PubSub, Schema, SchemaTypes } from "@google-cloud/pubsub";
import { LIMIT_MS, PUBSUB, run, Skip } from "./checks.mjs";

const KEYS = 4,
  MESSAGES_OF_A_KEY = 400,
  SAMPLES = 200;
// As in Google's samples.
const STATE = 'syntax = "proto3"; message Province { string name = 1; string post_abbr = 2; }';

function client() {
  if (!PUBSUB) throw new Skip("there is no embedded Pub/Sub at this service");
  process.env.PUBSUB_EMULATOR_HOST = PUBSUB;
  return new PubSub({ projectId: `clients-${randomUUID().slice(0, 8)}` });
}

// Topic and subscription while `use` runs, which also gets a promise of the first error.
async function subscribed(options, use, pubsub = client(), settings = {}) {
  const [topic] = await pubsub.createTopic({ name: "topic", ...settings });
  const [subscription] = await topic.createSubscription("subscription", options);
  let timer;
  const failed = new Promise((_, reject) => {
    subscription.on("error", reject);
    timer = setTimeout(() => reject(new Error(`not over after ${LIMIT_MS} ms`)), LIMIT_MS);
  });
  try {
    return await Promise.race([failed, use(topic, subscription)]);
  } finally {
    clearTimeout(timer);
    subscription.removeAllListeners();
    await subscription.close();
    await pubsub.close();
  }
}

// Acks each message and seeks at the first. The same message must come twice.
function comesAgain(seek) {
  return subscribed({}, async (topic, subscription) => {
    const [snapshot] = await subscription.createSnapshot("snapshot");
    const seen = [];
    const again = new Promise((resolve, reject) => {
      subscription.on("message", (message) => {
        message.ack();
        seen.push(message.id);
        if (seen.length === 1) seek(subscription, snapshot, message).catch(reject);
        else resolve();
      });
    });
    const id = await topic.publishMessage({ data: Buffer.from("again") });
    await again;
    assert.deepEqual(seen, [id, id]);
  });
}

await run({
  "messages of ordering keys come in order, acked in batches": () =>
    subscribed({ enableMessageOrdering: true }, async (topic, subscription) => {
      topic.setPublishOptions({ messageOrdering: true });
      const wanted = Array.from({ length: MESSAGES_OF_A_KEY }, (_, number) => number);
      const found = new Map();
      let left = KEYS * MESSAGES_OF_A_KEY;
      const all = new Promise((resolve) => {
        subscription.on("message", (message) => {
          const numbers = found.get(message.orderingKey) ?? [];
          found.set(message.orderingKey, [...numbers, Number(message.data)]);
          message.ack();
          if (--left === 0) resolve();
        });
      });
      const published = wanted.flatMap((number) =>
        Array.from({ length: KEYS }, (_, key) =>
          topic.publishMessage({ data: Buffer.from(`${number}`), orderingKey: `key ${key}` }),
        ),
      );
      await Promise.all([...published, all]);
      assert.equal(found.size, KEYS);
      for (const numbers of found.values()) assert.deepEqual(numbers, wanted);
    }),

  "a seek to a snapshot brings an acked message again": () =>
    comesAgain((_, snapshot) => snapshot.seek()),

  "a seek to the time of a message brings it again": () =>
    comesAgain((subscription, _, message) => subscription.seek(message.publishTime)),

  "a seek to the future drops what waits": () =>
    subscribed({}, async (topic, subscription) => {
      await topic.publishMessage({ data: Buffer.from("dropped") });
      await subscription.seek(new Date("3000-01-01"));
      const first = new Promise((resolve) => {
        subscription.on("message", (message) => {
          message.ack();
          resolve(message.data.toString());
        });
      });
      await topic.publishMessage({ data: Buffer.from("kept") });
      assert.equal(await first, "kept");
    }),

  // Two connections have no common order, so a few may be early.
  "most publishes end before their message comes": () =>
    subscribed({}, async (topic, subscription) => {
      const seen = new Set();
      let wake = () => {};
      subscription.on("message", (message) => {
        seen.add(message.id);
        message.ack();
        wake();
      });
      let early = 0;
      for (let number = 0; number < SAMPLES; number++) {
        const id = await topic.publishMessage({ data: Buffer.from(`${number}`) });
        if (seen.has(id)) early++;
        while (!seen.has(id)) await new Promise((resolve) => (wake = resolve));
      }
      assert.ok(early < SAMPLES / 4, `${early} of ${SAMPLES} came before`);
    }),

  "messages must fit a schema of protocol buffers": async () => {
    const pubsub = client();
    const schema = await pubsub.createSchema("state", SchemaTypes.ProtocolBuffer, STATE);
    await schema.validateMessage(Buffer.from('{"name": "Alberta"}'), Encodings.Json);
    const settings = { schema: await schema.getName(), encoding: Encodings.Json };
    const use = async (topic, subscription) => {
      const first = new Promise((resolve) => subscription.on("message", resolve));
      const wrong = topic.publishMessage({ data: Buffer.from('{"state": "Alberta"}') });
      await assert.rejects(wrong, /failed schema validation/);
      await topic.publishMessage({ data: Buffer.from('{"name": "Alberta", "postAbbr": "AB"}') });
      const message = await first;
      message.ack();
      const { encoding, name } = Schema.metadataFromMessage(message.attributes);
      assert.deepEqual([encoding, name], [Encodings.Json, settings.schema]);
    };
    await subscribed({}, use, pubsub, { schemaSettings: settings });
  },
});
// Its credentials look for Google's network, which keeps the program alive.
process.exit(0);
