// The AI SDK: embeddings, images and texts through its providers for OpenAI-compatible services,
// OpenAI and Replicate.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createReplicate } from "@ai-sdk/replicate";
import * as ai from "ai";
import {
  assertPng,
  assertSame,
  EMBEDDER,
  fresh,
  KEY,
  needsKeys,
  PAINTER,
  PROMPT,
  run,
  TOO_LONG,
  Skip,
  URL_,
  vectors,
  WRITER,
  WRONG_KEY,
} from "./checks.mjs";

const baseURL = `${URL_}/v1`;
const penstock = createOpenAICompatible({
  name: "penstock",
  baseURL,
  apiKey: KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL, apiKey: KEY });
const replicate = createReplicate({ baseURL, apiToken: KEY });
const embedder = penstock.embeddingModel(EMBEDDER);
const { embed, embedMany, generateImage } = ai;
globalThis.AI_SDK_LOG_WARNINGS = false;

const colors = ai.jsonSchema({
  type: "object",
  properties: { color: { type: "string", enum: ["red", "green"] } },
  required: ["color"],
  additionalProperties: false,
});

// The text model, through the provider for compatible services or that of OpenAI.
function writer(provider = penstock) {
  if (!WRITER) throw new Skip("this service has no text model: the extra `text` is not installed");
  return provider === openai ? provider.responses(WRITER) : provider.chatModel(WRITER);
}

async function streamed(model, prompt) {
  const told = ai.streamText({ model, prompt, temperature: 0, maxOutputTokens: 48 });
  let text = "";
  for await (const piece of told.textStream) text += piece;
  assert.ok(text.length > 10);
  assert.equal(text, await told.text);
  assert.ok((await told.usage).outputTokens > 5);
  return text;
}

await run({
  embed: async () => {
    const [value] = fresh(1);
    const { embedding, usage } = await embed({ model: embedder, value });
    assertSame([embedding], await vectors([value]));
    assert.ok(usage.tokens > 10);
  },
  "embedMany in order": async () => {
    const values = fresh(40);
    const { embeddings } = await embedMany({ model: embedder, values });
    assertSame(embeddings, await vectors(values));
  },
  "embedMany of more than one call takes": async () => {
    const values = fresh(2100);
    const { embeddings } = await embedMany({ model: embedder, values, maxParallelCalls: 1 });
    assertSame(embeddings.slice(-40), await vectors(values.slice(-40)));
    assert.equal(embeddings.length, values.length);
  },
  "fewer dimensions": async () => {
    const values = fresh();
    const providerOptions = { penstock: { dimensions: 64 } };
    const { embeddings } = await embedMany({ model: embedder, values, providerOptions });
    assertSame(embeddings, await vectors(values, { dimensions: 64 }));
  },
  "embed through the provider of OpenAI": async () => {
    const values = fresh();
    const { embeddings } = await embedMany({ model: openai.embeddingModel(EMBEDDER), values });
    assertSame(embeddings, await vectors(values));
  },
  "generateImage of a seed": async () => {
    const asked = { model: penstock.imageModel(PAINTER), prompt: PROMPT, size: "64x64" };
    const providerOptions = { penstock: { seed: 5 } };
    const first = await generateImage({ ...asked, n: 2, providerOptions });
    assert.equal(first.images.length, 2);
    for (const image of first.images) assertPng(image.uint8Array);
    const again = await generateImage({ ...asked, providerOptions });
    assert.equal(again.image.base64, first.images[0].base64);
  },
  "generateImage through the provider of OpenAI": async () => {
    const { image } = await generateImage({
      model: openai.imageModel(PAINTER),
      prompt: PROMPT,
      size: "64x64",
    });
    assertPng(image.uint8Array);
  },
  "generateImage through the provider of Replicate": async () => {
    const { images } = await generateImage({
      model: replicate.image(`any/${PAINTER}`),
      prompt: PROMPT,
      n: 2,
      seed: 5,
    });
    assert.equal(images.length, 2);
    for (const image of images) assertPng(image.uint8Array);
  },
  "streamText and generateText": async () => {
    const prompt = "What is a mill?";
    const text = await streamed(writer(), prompt);
    const model = writer();
    const whole = await ai.generateText({ model, prompt, temperature: 0, maxOutputTokens: 48 });
    assert.equal(whole.text, text);
  },
  "streamText through the provider of OpenAI, which asks for responses": async () => {
    await streamed(writer(openai), "Name a river.");
  },
  "generateObject": async () => {
    if (!ai.generateObject) throw new Skip("this version has generateText with an output instead");
    const asked = { model: writer(), prompt: "A color?", schema: colors, temperature: 0 };
    const { object } = await ai.generateObject(asked);
    assert.ok(["red", "green"].includes(object.color));
  },
  "generateText with an output of a schema": async () => {
    const output = ai.Output.object({ schema: colors });
    const made = await ai.generateText({ model: writer(), prompt: "A color?", output });
    assert.ok(["red", "green"].includes(made.output.color));
  },
  "a tool is called": async () => {
    const paint = ai.tool({ description: "Paints.", inputSchema: colors });
    const asked = { model: writer(), prompt: "Paint it.", tools: { paint }, temperature: 0 };
    const { toolCalls } = await ai.generateText({ ...asked, toolChoice: "required" });
    assert.equal(toolCalls[0].toolName, "paint");
    assert.ok(["red", "green"].includes(toolCalls[0].input.color));
  },
  "a tool loop of three steps through openai(model), with its defaults": async () => {
    if (!WRITER) throw new Skip("this service has no text model: the extra `text` is not installed");
    const painted = [];
    const execute = async ({ color }) => painted.push(color) && "It is painted.";
    const paint = ai.tool({ description: "Paints.", inputSchema: colors, execute });
    const asked = { model: openai(WRITER), prompt: "Paint it.", tools: { paint } };
    const stopWhen = ai.stepCountIs(3);
    const { steps } = await ai.generateText({ ...asked, toolChoice: "required", stopWhen });
    assert.equal(steps.length, 3);
    assert.equal(painted.length, 3);
    const streaming = ai.streamText({ ...asked, toolChoice: "required", stopWhen });
    assert.equal((await streaming.steps).length, 3);
  },
  "unknown model is told": async () => {
    const asking = embed({ model: penstock.embeddingModel("no-such-model"), value: "a" });
    await assert.rejects(asking, (error) => {
      assert.ok(ai.APICallError.isInstance(error), error);
      return error.statusCode === 404 && error.message.includes("no-such-model");
    });
  },
  "too long text is refused": async () => {
    await assert.rejects(embed({ model: embedder, value: TOO_LONG }), (error) => {
      return error.statusCode === 400 && error.message.includes("256 tokens");
    });
  },
  "wrong key is refused": async () => {
    await needsKeys();
    const stranger = createOpenAICompatible({ name: "penstock", baseURL, apiKey: WRONG_KEY });
    const asking = embed({ model: stranger.embeddingModel(EMBEDDER), value: "a" });
    await assert.rejects(asking, (error) => error.statusCode === 401);
  },
});
