// What people should know of a model before they use it: what it does, and what it costs.

import { call } from "./api.js";
import { h } from "./dom.js";
import { dollars } from "./money.js";
import { count } from "./wording.js";

const ABOUT = {
  text: "Writes text: answers, stories, summaries. It streams as it writes.",
  embedding: "Turns each text into numbers, so that texts with a similar meaning can be found.",
  similarity: "Scores how well each text answers a query.",
  image: "Draws images from a description, or redraws an image that you send.",
  custom: "A custom model with inputs and outputs of its own.",
};
const APIS = {
  transcription: "Writes down what is said in a recording.",
  speech: "Reads a text aloud.",
  ocr: "Reads the text of a document's pages.",
};
const TYPICAL_IN = 500;
const TYPICAL_OUT = 250;

/** The JSON Schema of a model's input. */
export async function inputSchemaOf(name, signal) {
  const [version] = (await call(`v1/models/penstock/${encodeURIComponent(name)}/versions`, { signal })).results;
  return version.openapi_schema.components.schemas.Input;
}

/** A card with the model's description and price. */
export function about(model, schema) {
  const words = priceOf(model.price ?? {}, model.task, schema.properties ?? {});
  return h(
    "div",
    { class: "about" },
    h("p", {}, APIS[model.api] ?? ABOUT[model.task] ?? ABOUT.custom),
    h("p", { class: "muted" }, words),
  );
}

function priceOf(price, task, fields) {
  const inputUsd = price.per_million_tokens_usd ?? 0;
  const outputUsd = price.per_million_output_tokens_usd ?? inputUsd;
  const pixelUsd = price.per_million_pixel_steps_usd ?? 0;
  const parts = [];
  if (inputUsd || outputUsd) {
    parts.push(task === "text" ? `${dollars(inputUsd)} per million tokens read, ${dollars(outputUsd)} written` : `${dollars(inputUsd)} per million tokens`);
  }
  if (pixelUsd) parts.push(`${dollars(pixelUsd)} per million pixels times steps`);
  if (price.per_item_usd) parts.push(`${dollars(price.per_item_usd)} per result`);
  if (price.per_work_usd) parts.push(`${dollars(price.per_work_usd)} per unit of work`);
  if (price.per_second_usd) parts.push(`${dollars(price.per_second_usd)} per second of computing`);
  if (!parts.length) return task === "custom" ? "It has no price. If it is a flow, its steps are charged." : "Using it is free.";
  return `${parts.join(", ")}. ${typical(task, inputUsd, outputUsd, pixelUsd, fields)}`;
}

function typical(task, inputUsd, outputUsd, pixelUsd, fields) {
  if (task === "text") {
    const usd = (TYPICAL_IN * inputUsd + TYPICAL_OUT * outputUsd) / 1e6;
    return `A question of ${TYPICAL_IN} tokens with an answer of ${TYPICAL_OUT} costs ${dollars(usd)}.`;
  }
  if (inputUsd) return `1,000 texts of 100 tokens cost ${dollars(inputUsd / 10)}.`;
  const [width, height, steps] = ["width", "height", "num_inference_steps"].map((name) => fields[name]?.default);
  if (pixelUsd && width && height && steps) {
    return `An image of ${count(width)} × ${count(height)} in ${steps} steps costs ${dollars((width * height * steps * pixelUsd) / 1e6)}.`;
  }
  return "";
}
