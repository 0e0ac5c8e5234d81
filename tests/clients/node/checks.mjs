// What every script of a Node client shares: where the service is, what it answers without the
// client, and how the outcome of each check is told. The counterpart of
// tests/clients/python/checks.py.
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { createServer } from "node:http";

export const URL_ = process.env.PENSTOCK_CLIENTS_URL;
export const KEY = process.env.PENSTOCK_CLIENTS_KEY;
export const EMBEDDER = process.env.PENSTOCK_CLIENTS_EMBEDDER;
export const PAINTER = process.env.PENSTOCK_CLIENTS_PAINTER;
export const WRITER = process.env.PENSTOCK_CLIENTS_WRITER;
export const PUBSUB = process.env.PENSTOCK_CLIENTS_PUBSUB;
export const EXPECTED = process.env.PENSTOCK_CLIENTS_EXPECTED;
export const AUDIO = process.env.PENSTOCK_CLIENTS_AUDIO;
export const WRONG_KEY = "wrong-" + "0".repeat(40);
export const LIMIT_MS = Number(process.env.PENSTOCK_CLIENTS_LIMIT_S) * 1000;
export const PROMPT = "a large red circle on a white background";
export const TOO_LONG = "the turbine turns ".repeat(400);
// Of two vectors of one text. They may be from batches of different lengths, in bf16.
const LEAST_COSINE = 0.9999;

export class Skip extends Error {}

// Runs all checks in order and prints one line of JSON for each.
// The name of a check says what is checked.
export async function run(checks) {
  for (const [check, body] of Object.entries(checks)) {
    let outcome = "passed",
      reason = "";
    try {
      await body();
    } catch (error) {
      outcome = error instanceof Skip ? "skipped" : "failed";
      const line = /checks\.mjs:(\d+)/.exec(
        error.stack?.split("\n").find((one) => one.includes("_checks.mjs")) ?? "",
      );
      reason =
        error instanceof Skip
          ? error.message
          : `line ${line?.[1] ?? "?"}: ${error.name}: ${error.message}`;
    }
    console.log(JSON.stringify({ check, outcome, reason: reason.slice(0, 2000) }));
  }
}

async function ask(path, key, body) {
  return fetch(URL_ + path, {
    method: body ? "POST" : "GET",
    headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
    body: body && JSON.stringify(body),
  });
}

// What the service answers without any client.
export async function post(path, body) {
  const answer = await ask(path, KEY, body);
  assert.equal(answer.status, 200, await answer.clone().text());
  return answer.json();
}

// Skips a check about keys where the service takes any.
export async function needsKeys() {
  if ((await ask("/v1/models", WRONG_KEY)).ok) throw new Skip("this service takes any key");
}

// Skips a check that receives calls from the service.
export function needsSameMachine() {
  if (!URL_.startsWith("http://127.0.0.1:"))
    throw new Skip("a service on another machine can't call this one");
}

export async function vectors(texts, options = {}) {
  const answer = await post("/v1/embeddings", { model: EMBEDDER, input: texts, ...options });
  return answer.data.map((item) => item.embedding);
}

// Fails unless both have the same unit vectors in the same order.
export function assertSame(got, expected) {
  assert.equal(got.length, expected.length, "number of vectors");
  got.forEach((one, number) => {
    const other = expected[number];
    assert.equal(one.length, other.length, `dimensions of vector ${number}`);
    const product = (a, b) => a.reduce((sum, value, at) => sum + value * b[at], 0);
    assert.ok(
      product(one, other) >= LEAST_COSINE,
      `vector ${number}: cosine ${product(one, other)}`,
    );
    assert.ok(Math.abs(product(one, one) - 1) < 2e-3, `vector ${number}: not of length 1`);
  });
}

// Texts that no cache has seen, of different lengths.
export function fresh(count = 3) {
  return Array.from(
    { length: count },
    (_, n) => `${randomUUID()} ${"flows to the sea ".repeat((n % 5) + 1)}`,
  );
}

export function assertPng(bytes) {
  assert.equal(Buffer.from(bytes).subarray(1, 4).toString(), "PNG");
}

// Runs a server on this machine while `use` runs, which gets its URL.
export async function serving(handler, use) {
  const server = createServer(handler).listen(0, "127.0.0.1");
  await new Promise((resolve) => server.once("listening", resolve));
  try {
    return await use(`http://127.0.0.1:${server.address().port}`);
  } finally {
    server.closeAllConnections();
    server.close();
  }
}

export async function bodyOf(request) {
  const parts = [];
  for await (const part of request) parts.push(part);
  return Buffer.concat(parts).toString();
}

// A relay to the service that hangs up instead of passing the first answer.
export function relayThatLosesTheFirstAnswer(use) {
  let received = 0;
  return serving(async (request, reply) => {
    const { authorization, "content-type": type, "idempotency-key": key } = request.headers;
    const headers = { authorization, "content-type": type, "idempotency-key": key };
    const answer = await fetch(URL_ + request.url, {
      method: "POST",
      headers,
      body: await bodyOf(request),
    });
    const data = await answer.text();
    received += 1;
    if (received === 1) return request.socket.destroy();
    const replayed = answer.headers.get("idempotent-replayed") ?? "false";
    reply.writeHead(answer.status, {
      "content-type": "application/json",
      "idempotent-replayed": replayed,
    });
    reply.end(data);
  }, use);
}
