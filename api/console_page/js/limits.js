// Limits of plans and keys: their names for people, and a form that changes them.

import { field } from "./admin.js";
import { h } from "./dom.js";
import { dollars } from "./money.js";
import { count } from "./wording.js";

const MB = 1e6;
const HOUR_S = 3600;

/** Numbers of a plan. `factor` converts what is typed to what is stored. */
const NUMBERS = {
  budget_usd_per_month: { label: "Monthly budget (USD)", min: 0, words: (value) => `${dollars(value)} per month` },
  requests_per_min: { label: "Requests per minute", min: 1, step: 1, words: (value) => `${count(value)} requests/min` },
  tokens_per_min: { label: "Tokens per minute", min: 1, step: 1, words: (value) => `${count(value)} tokens/min` },
  pixel_steps_per_min: { label: "Pixel-steps per minute", min: 1, step: 1, words: (value) => `${count(value)} pixel-steps/min` },
  work_per_min: { label: "Custom work per minute", min: 1, step: 1, words: (value) => `${count(value)} work/min` },
  max_in_flight: { label: "Items in flight", min: 1, step: 1, words: (value) => `${count(value)} items in flight` },
  weight: { label: "Weight", min: 0.01, max: 1000, usual: 1, hint: "Share of a busy model, relative to other tenants.", words: (value) => `weight ${value}` },
  batch_price_share: { label: "Batch price (share)", min: 0, max: 1, usual: 0.5, hint: "0.5 means half price.", words: (value) => `batches at ${Math.round(value * 100)} %` },
  storage_max_bytes: { label: "Storage (MB)", unset: "usual limit", min: 0.000001, factor: MB, words: (value) => `${count(value / MB)} MB of files` },
  prediction_keep_s: { label: "Keep predictions (hours)", unset: "usual time", min: 1 / 60, max: 720, factor: HOUR_S, words: (value) => `predictions kept ${count(value / HOUR_S)} h` },
};

/** What is limited, in words. Usual values are left out. Empty: nothing. */
export function limitWords(limits) {
  if (!limits) return "";
  const words = Object.entries(NUMBERS)
    .filter(([name, { usual }]) => (limits[name] ?? null) !== null && limits[name] !== usual)
    .map(([name, { words: write }]) => write(limits[name]));
  if (limits.max_priority === "batch") words.push("only batch priority");
  const models = Object.keys(limits.per_model ?? {});
  if (models.length) words.push(`rates for ${models.join(", ")}`);
  return words.join(" · ");
}

/**
 * The fields of a plan.
 * @param {object} plan its values so far. Those that have no field stay as they are.
 * @returns {{element: HTMLElement, read: function(): object}} `read` gives the changed plan, or throws what is wrong.
 */
export function planFields(plan) {
  const numbers = Object.entries(NUMBERS).map(([name, given]) => [name, given, numberInput(name, given, plan[name])]);
  const priority = h(
    "select",
    { id: "plan-max_priority" },
    ["interactive", "batch"].map((value) => h("option", { value, selected: value === plan.max_priority }, value)),
  );
  const webhook = h("input", { id: "plan-webhook", type: "url", value: plan.budget_webhook ?? "", placeholder: "none", autocomplete: "off" });
  const rates = h("textarea", { id: "plan-per_model", rows: 3, spellcheck: "false", placeholder: '{"all-MiniLM-L6-v2": {"requests_per_min": 60}}' });
  rates.value = Object.keys(plan.per_model ?? {}).length ? JSON.stringify(plan.per_model, null, 2) : "";
  const read = () => ({
    ...plan,
    ...Object.fromEntries(numbers.map(([name, given, input]) => [name, valueOf(input, given)])),
    max_priority: priority.value,
    budget_webhook: webhook.value.trim(),
    per_model: parsedRates(rates.value),
  });
  const element = h(
    "div",
    { class: "fields narrow" },
    numbers.map(([, { label, hint }, input]) => field(label, input, hint)),
    field("Highest priority", priority),
    field("Budget webhook", webhook),
    h("div", { class: "field text" }, h("label", { for: rates.id }, "Rates for single models, as JSON"), rates),
  );
  return { element, read };
}

function numberInput(name, { min, max, step = "any", factor = 1, usual, unset = "no limit" }, value) {
  const shown = (value ?? null) === null ? "" : value / factor;
  return h("input", { id: `plan-${name}`, type: "number", min, max, step, value: shown, placeholder: usual ?? unset });
}

function valueOf(input, { factor = 1, usual = null }) {
  if (input.value === "") return usual;
  return factor === 1 ? Number(input.value) : Math.round(Number(input.value) * factor);
}

function parsedRates(text) {
  if (!text.trim()) return {};
  try {
    return JSON.parse(text);
  } catch {
    throw new Error("Rates for single models: this is not JSON.");
  }
}
