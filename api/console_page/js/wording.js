// Headings and values of reports for people: words, units and aligned numbers.

import { dollars } from "./money.js";
import { duration } from "./timing.js";

const UNITS = { _usd: "money", _percent: "%", _ms: "ms", _s: "s" };
const SMALL = new Set(["p50", "p90", "p95", "p99"]);
const NAMES = { slo: "SLO", gpu: "GPU", gpus: "GPUs", id: "ID", usd: "$", list_usd: "List price", hit_percent: "From cache", device_s: "Device time", key_id: "Key" };
const ISO_DAY = /^\d{4}-\d{2}-\d{2}$/;
const ISO_TIME = /^\d{4}-\d{2}-\d{2}T[\d:.]+(Z|[+-]\d{2}:\d{2})?$/;
const number = new Intl.NumberFormat(undefined, { maximumFractionDigits: 2 });
const seconds = new Intl.NumberFormat(undefined, { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const exact = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 4 });
const compact = new Intl.NumberFormat(undefined, { notation: "compact", maximumSignificantDigits: 3 });
const dayWords = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", timeZone: "UTC" });

/** What a column is measured in: money, %, ms or s. Empty: a count or a text. */
export function unitOf(column) {
  if (/_usd(_|$)/.test(column)) return "money";
  return UNITS[/_(percent|ms|s)$/.exec(column)?.[0]] ?? "";
}

/** A column's name in words, without its unit: `queue_p95_ms` is `Queue p95`. */
export function heading(column) {
  if (Object.hasOwn(NAMES, column)) return NAMES[column];
  const words = column
    .replace(/_(usd|percent|ms|s)$/, "")
    .split("_")
    .map((word) => NAMES[word] ?? word);
  if (SMALL.has(words[0])) return words.join(" ");
  return capital(words.join(" "));
}

/** Words with a capital first letter. */
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** A report's name in words. */
export const titleOf = (name) => NAMES[name] ?? capital(name.replaceAll("_", " "));

/** The unit to show behind a heading. Money has its sign in each cell. */
export const unitWords = (column) => ({ money: "", "%": "%", ms: "ms", s: "s" })[unitOf(column)] ?? "";

/** A cell of a report for people. */
export function cellText(column, value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "number") return unitOf(column) === "s" ? seconds.format(value) : count(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (ISO_TIME.test(value)) return value.slice(0, 16).replace("T", " ");
  return value;
}

/** A number for people: whole, with two decimals, or with four digits if it is small. */
export const count = (value) => (value && Math.abs(value) < 0.1 ? exact : number).format(value);

/** Any value of a plot, with its unit. */
export function measured(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "US dollars") return dollars(value);
  if (unit === "ms") return duration(value);
  return unit ? `${count(value)} ${unit}` : count(value);
}

/** A number next to an axis whose lines are `step` apart. */
export function tick(value, step, unit) {
  if (unit !== "US dollars") return compact.format(value);
  if (Math.abs(value) < step / 2) return "$0";
  if (Math.abs(value) >= 10_000) return `$${compact.format(value)}`;
  const power = Math.floor(Math.log10(step) + 1e-9);
  // 2.5 needs one more digit than 1, 2 or 5.
  const isHalf = Math.abs(step / 10 ** power - 2.5) < 0.01;
  const digits = Math.max(0, -power + (isHalf ? 1 : 0));
  const places = step < 1 ? Math.max(2, digits) : digits;
  return `${value < 0 ? "-" : ""}$${Math.abs(value).toFixed(Math.min(12, places))}`;
}

/** A place on an axis: a day, an hour, or a name. */
export function placeText(place) {
  if (ISO_DAY.test(place)) return dayWords.format(new Date(`${place}T00:00Z`));
  if (ISO_TIME.test(place)) return `${dayWords.format(new Date(`${place.slice(0, 10)}T00:00Z`))} ${place.slice(11, 16)}`;
  return place;
}

/** True if places are days or hours, in order. */
export const isTime = (places) => places.every((place) => ISO_DAY.test(place) || ISO_TIME.test(place));
