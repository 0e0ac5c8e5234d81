// OpenAI's own client for Node against models of speech: each form, streams, times, batches and
// errors. The counterpart of tests/clients/python/audio_checks.py. What is sent and what is to come
// is in the file PENSTOCK_CLIENTS_AUDIO.
import assert from "node:assert/strict";
import { createReadStream, readFileSync } from "node:fs";
import { setTimeout } from "node:timers/promises";
import OpenAI, { toFile } from "openai";
import { AUDIO, KEY, LIMIT_MS, run, URL_ } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${URL_}/v1`, apiKey: KEY, timeout: LIMIT_MS, maxRetries: 0 });
const given = AUDIO ? JSON.parse(readFileSync(AUDIO, "utf8")) : {};
const model = given.hearer;
const opened = () => createReadStream(given.recording);
const transcribed = (fields = {}) =>
  client.audio.transcriptions.create({ model, file: opened(), ...fields });
const split = (text) => text.trim().split(/\s+/);

async function refused(promise, status, param) {
  await assert.rejects(promise, (error) => {
    assert.deepEqual([error.status, error.param], [status, param], error.message);
    return true;
  });
}

await run({
  "json with usage in seconds": async () => {
    const { text, usage } = await transcribed();
    assert.equal(text, given.text);
    assert.deepEqual(usage, { type: "duration", seconds: given.seconds });
  },
  "text and subtitles": async () => {
    assert.equal(await transcribed({ response_format: "text" }), `${given.text}\n`);
    const srt = await transcribed({ response_format: "srt" });
    const vtt = await transcribed({ response_format: "vtt" });
    assert.ok(srt.startsWith("1\n00:00:0"), srt);
    assert.ok(vtt.startsWith("WEBVTT\n\n00:00:0"), vtt);
    for (const text of [srt, vtt])
      assert.equal(text.split(" --> ").length - 1, given.segments.length);
  },
  "times of segments and words": async () => {
    const usual = await transcribed({ response_format: "verbose_json" });
    assert.deepEqual(
      usual.segments.map(({ text }) => text.trim()),
      given.segments.map((text) => text.trim()),
    );
    const times = usual.segments.flatMap(({ start, end }) => [start, end]);
    assert.deepEqual(times, times.toSorted((a, b) => a - b));
    const wanted = { response_format: "verbose_json", timestamp_granularities: ["word", "segment"] };
    const both = await transcribed(wanted);
    assert.deepEqual([both.words.length, both.segments.length], [given.words, given.segments.length]);
    assert.deepEqual(split(both.words.map(({ word }) => word).join("")), split(given.text));
  },
  "a stream has deltas and the whole": async () => {
    const events = [];
    for await (const event of await transcribed({ stream: true })) events.push(event);
    const done = events.pop();
    assert.deepEqual(
      events.map(({ type, delta }) => [type, delta]),
      given.segments.map((text) => ["transcript.text.delta", text]),
    );
    assert.deepEqual([done.type, done.text], ["transcript.text.done", given.text]);
  },
  "a translation": async () => {
    const asked = client.audio.translations.create({ model, file: opened() });
    if (given.translates) assert.equal((await asked).text, given.text.toUpperCase());
    else await refused(asked, 400, "model");
  },
  "lines of a batch by ids of uploads": async () => {
    const upload = await client.files.create({ file: opened(), purpose: "user_data" });
    const url = "/v1/audio/transcriptions";
    const line = { custom_id: "a", method: "POST", url, body: { model, url: upload.id } };
    const file = await client.files.create({
      file: await toFile(Buffer.from(JSON.stringify(line)), "lines.jsonl"),
      purpose: "batch",
    });
    const asked = { input_file_id: file.id, endpoint: url, completion_window: "24h" };
    let batch = await client.batches.create(asked);
    const until = Date.now() + LIMIT_MS;
    while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
      assert.ok(Date.now() < until, batch.status);
      await setTimeout(250);
      batch = await client.batches.retrieve(batch.id);
    }
    assert.equal(batch.status, "completed", JSON.stringify(batch.errors));
    const answers = await (await client.files.content(batch.output_file_id)).text();
    assert.equal(JSON.parse(answers).response.body.text, given.text);
  },
  "speech whole and in parts": async () => {
    const body = { model: given.speaker, voice: given.voice, input: given.said };
    const asked = { ...body, response_format: "pcm" };
    const whole = Buffer.from(await (await client.audio.speech.create(asked)).arrayBuffer());
    const answer = await client.audio.speech.create({ ...asked, stream_format: "sse" });
    const lines = (await answer.text()).split("\n").filter((line) => line.startsWith("data: "));
    const events = lines.map((line) => JSON.parse(line.slice("data: ".length)));
    const done = events.pop();
    assert.ok(events.length > 1);
    assert.ok(events.every(({ type }) => type === "speech.audio.delta"));
    const parts = Buffer.concat(events.map(({ audio }) => Buffer.from(audio, "base64")));
    assert.ok(parts.equals(whole), `${parts.length} bytes, not ${whole.length}`);
    assert.deepEqual(done, {
      type: "speech.audio.done",
      usage: { type: "characters", characters: given.said.length },
    });
  },
  "errors name the field": async () => {
    const noise = () => toFile(Buffer.from("noise ".repeat(1000)), "a.wav");
    await refused(transcribed({ file: await noise() }), 400, "file");
    await refused(transcribed({ file: await noise(), stream: true }), 400, "file");
    await refused(transcribed({ file: await toFile(Buffer.from(""), "a.wav") }), 400, "file");
    await refused(transcribed({ response_format: "docx" }), 400, "response_format");
    await refused(transcribed({ include: ["logprobs"] }), 400, "include");
    const words = { timestamp_granularities: ["word"] };
    await refused(transcribed(words), 400, "timestamp_granularities");
    await refused(transcribed({ stream: true, response_format: "srt" }), 400, "stream");
    await refused(transcribed({ model: "nobody" }), 404, "model");
    const body = { model: given.speaker, voice: "nobody", input: "a" };
    await refused(client.audio.speech.create(body), 400, "voice");
  },
});
