// Whether a prediction can be created again: the API does not show everything that created it.

import { call } from "./api.js";
import { SECRET, coreOf } from "./form.js";
import { inputSchemaOf } from "./models.js";

const URL_START = /^(https?|data):/i;
const STORED_FILE = /^https?:\/\/.*\/v1\/files\//i;
const OTHER_INPUT = "the model does not accept this input at /v1/predictions";

/** The model of a prediction, without its owner. */
export const modelOf = ({ model }) => model.split("/").pop();

/**
 * Finds out which predictions can't be created again from their displayed input.
 * @returns {Promise<Map<string, string>>} why not, by ID. Empty: it can be.
 */
export async function obstaclesOf(predictions, signal) {
  const { data } = await call("v1/models", { signal });
  const tasks = new Map(data.map(({ id, task }) => [id, task]));
  const names = [...new Set(predictions.map(modelOf))].filter((name) => tasks.has(name));
  const schemas = new Map(await Promise.all(names.map(async (name) => [name, await inputSchemaOf(name, signal)])));
  return new Map(
    predictions.map((prediction) => {
      const name = modelOf(prediction);
      const schema = schemas.get(name);
      if (!schema) return [prediction.id, "this key can't use the model"];
      // Other endpoints have other fields and defaults, and files that are not part of the displayed input.
      if (prediction.endpoint) return [prediction.id, `it was sent to ${prediction.endpoint}, not to /v1/predictions`];
      return [prediction.id, obstacleOf(prediction.input, schema, tasks.get(name))];
    }),
  );
}

function obstacleOf(input, { properties = {}, required = [] }, task) {
  const values = Object.entries(input).filter(([, value]) => value !== null);
  const names = new Set(values.map(([name]) => name));
  const fits = values.every(([name]) => Object.hasOwn(properties, name)) && required.every((name) => names.has(name));
  if (!fits) return OTHER_INPUT;
  for (const [name, value] of values) {
    const { core } = coreOf(properties[name]);
    if (core.format === "password" && value === SECRET) return `the secret ${name} is not shown`;
    if ((core.format ?? core.items?.format) === "uri") {
      if (![value].flat().every((url) => URL_START.test(url))) return OTHER_INPUT;
    } else if (task === "custom" && STORED_FILE.test(value)) return `${name} is too large to be shown`;
  }
  return "";
}
