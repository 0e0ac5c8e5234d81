// The view "Usage": what a tenant used and was charged, for any range, by model, key, tenant and day.
// `#usage/RANGE/SPLIT/TENANT` is its address. All numbers come from the rows of one report.

import { ApiError, call, reportRows } from "./api.js";
import { chart } from "./chart.js";
import { saveCsv } from "./csv.js";
import { button, failure, h, put } from "./dom.js";
import { choice, rangeChoice, selection } from "./filters.js";
import { dollars } from "./money.js";
import { asked, daysBetween, daysInWords, openedRange, zone } from "./ranges.js";
import { dataTable } from "./tables.js";
import { count } from "./wording.js";

const SPLITS = { model: "Model", key_id: "Key", tenant: "Tenant" };
const ALL = "*";
const NONE = "(none)";
const MOST_SERIES = 8;
const MOST_KEY_PAGES = 10;
const MEASURES = ["requests", "refused", "succeeded", "cached", "tokens", "pixel_steps", "device_s", "cost_usd"];
const LABELS = {
  refused: "Refused",
  succeeded: "Items delivered",
  cached: "From cache",
  pixel_steps: "Pixel-steps",
  device_s: "Device time",
  cost_usd: "Cost",
};

/** Shows the view. */
export async function show(place, [rangeName, splitName, tenantName], signal) {
  put(place, h("h1", {}, "Usage"), h("p", { class: "muted loading" }, "Loading …"));
  const tz = zone();
  const range = openedRange(rangeName, "this-month", tz);
  const [summary, { data: reports }] = await Promise.all([call("v1/usage", { signal }), call("v1/reports", { signal })]);
  const isAdmin = reports.some((one) => one.audience === "operators");
  const chosen = { range, split: Object.hasOwn(SPLITS, splitName) ? splitName : "model", tenant: tenantName || (isAdmin ? ALL : summary.tenant) };
  // A copied address opens the same numbers.
  if (!rangeName) history.replaceState(null, "", addressOf(chosen));
  put(place, ...(await page({ chosen, summary, isAdmin, tz, signal })));
}

const addressOf = ({ range, split, tenant }) => `#usage/${[range.name, split, tenant].map(encodeURIComponent).join("/")}`;

async function page({ chosen, summary, isAdmin, tz, signal }) {
  const { rows, error } = await rowsOf(chosen, isAdmin, tz, signal);
  const days = daysBetween(chosen.range.first, chosen.range.last);
  const isAll = chosen.tenant === ALL;
  const split = chosen.split === "tenant" && !isAll ? "model" : chosen.split;
  const go = (change) => {
    location.hash = addressOf({ ...chosen, ...change });
  };
  if (isAdmin && split === "key_id") await nameKeys(rows, isAll, signal);
  const ways = isAll ? SPLITS : { model: SPLITS.model, key_id: SPLITS.key_id };
  return [
    h(
      "div",
      { class: "row between" },
      h("div", {}, h("h1", {}, "Usage"), h("p", { class: "scope" }, scopeOf(chosen, tz))),
      h("div", { class: "row no-print" }, buttons(chosen, rows)),
    ),
    h(
      "div",
      { class: "card filters no-print" },
      rangeChoice(
        chosen.range,
        (name) => addressOf({ ...chosen, range: { name } }),
        (name) => go({ range: { name } }),
      ),
      choice("Split by", ways, split, (name) => addressOf({ ...chosen, split: name })),
      isAdmin && selection("usage-tenant", "Tenant", await tenantsOf(chosen, summary, rows, isAll || error, tz, signal), chosen.tenant, (tenant) => go({ tenant })),
    ),
    ...(error ? [failure(error)] : results(rows, days, split, chosen, summary, signal)),
  ];
}

function results(rows, days, split, chosen, summary, signal) {
  return [
    h("div", { class: "tiles" }, tiles(rows, chosen, summary)),
    plots(rows, days, split),
    h("h2", {}, `By ${SPLITS[split].toLowerCase()}`),
    groupTable(rows, split, signal),
    h("h2", {}, "By day"),
    dayTable(rows, days, signal),
  ];
}

/** Whose numbers these are, of which days. It holds for everything on the page. */
function scopeOf({ tenant, range }, tz) {
  const who = tenant === ALL ? "All tenants" : `Tenant ${tenant}`;
  return `${who} · ${daysInWords(range.first, range.last)} · days of ${tz}`;
}

async function rowsOf({ range, tenant }, isAdmin, tz, signal) {
  const query = new URLSearchParams(asked(range, tz));
  if (isAdmin && tenant !== ALL) query.set("tenant", tenant);
  try {
    return { rows: await reportRows("usage_keys", query, signal) };
  } catch (error) {
    // The controls stay, so that another range can be chosen.
    if (error instanceof ApiError && error.status < 500) return { rows: [], error };
    throw error;
  }
}

/** Adds the names of keys to rows, which only have their IDs. Deleted keys have no names. */
async function nameKeys(rows, isAll, signal) {
  const names = new Map();
  try {
    for (let page = 0, after = ""; page < MOST_KEY_PAGES; page += 1) {
      const query = new URLSearchParams({ limit: 100, ...(after && { after }) });
      const { data, has_more: hasMore, last_id: last } = await call(`v1/admin/keys?${query}`, { signal });
      for (const key of data) names.set(key.id, isAll ? `${key.name} of ${key.tenant} (${key.id})` : `${key.name} (${key.id})`);
      if (!hasMore) break;
      after = last;
    }
  } catch (error) {
    // An API without keys has no directory of them.
    if (!(error instanceof ApiError)) throw error;
  }
  for (const row of rows) row.key_words = names.get(row.key_id);
}

/** The tenants to choose from: those of the rows if they are all, or if the range has no answer. */
async function tenantsOf({ range, tenant }, summary, rows, areRowsAll, tz, signal) {
  let names = rows.map((row) => row.tenant);
  if (!areRowsAll) {
    const { rows: all } = await call(`v1/reports/tenants?${new URLSearchParams(asked(range, tz))}`, { signal });
    names = all.map(([name]) => name);
  }
  const known = [...new Set([summary.tenant, tenant, ...names])].filter((name) => name && name !== ALL).sort();
  return { [ALL]: "All tenants", ...Object.fromEntries(known.map((name) => [name, name])) };
}

const sum = (rows, measure) => rows.reduce((total, row) => total + (row[measure] ?? 0), 0);
const nameIn = (row, split) => (split === "key_id" && row.key_words) || row[split] || NONE;

function tiles(rows, { tenant }, summary) {
  const tile = (name, value, more) =>
    h("div", { class: "card tile" }, h("span", { class: "muted" }, name), h("b", {}, value), h("span", { class: "muted" }, more));
  const refused = sum(rows, "refused");
  const [items, cached] = [sum(rows, "succeeded"), sum(rows, "cached")];
  const budget = summary.budget_usd_per_month;
  const spent = summary.month.total.cost_usd;
  return [
    tile("Cost", dollars(sum(rows, "cost_usd")), "US dollars, before tax"),
    tile("Requests", count(sum(rows, "requests")), refused ? `${count(refused)} refused` : "none refused"),
    tile("Items delivered", count(items), items ? `${Math.round((100 * cached) / items)} % from the cache` : ""),
    tile("Tokens", count(sum(rows, "tokens")), "of texts"),
    budget !== null &&
      tenant === summary.tenant &&
      tile("Budget this month", dollars(budget), `${Math.round((100 * spent) / Math.max(budget, 1e-9))} % used, months in UTC`),
  ];
}

function plots(rows, days, split) {
  const plot = (title, measure, unit, words) =>
    chart({ kind: "bars", title, unit, stacked: true, series: seriesOf(rows, days, split, measure) }, words(sum(rows, measure)));
  return h(
    "div",
    { class: "drawings" },
    h("div", { class: "wide" }, plot("Cost by day", "cost_usd", "US dollars", dollars)),
    plot("Requests by day", "requests", "", count),
    plot("Items delivered by day", "succeeded", "", count),
  );
}

/** A series per name, the most expensive first, so that a name has one color in all plots. */
function seriesOf(rows, days, split, measure) {
  const names = grouped(rows, split).map(([name]) => name);
  const own = names.length > MOST_SERIES ? names.slice(0, MOST_SERIES - 1) : names;
  const byName = new Map((own.length < names.length ? [...own, "others"] : own).map((name) => [name, days.map(() => 0)]));
  if (!byName.size) byName.set(NONE, days.map(() => 0));
  const at = new Map(days.map((day, index) => [day, index]));
  for (const row of rows) {
    const values = byName.get(nameIn(row, split)) ?? byName.get("others");
    if (at.has(row.day)) values[at.get(row.day)] += row[measure] ?? 0;
  }
  return [...byName].map(([name, y]) => ({ name, x: days, y }));
}

function grouped(rows, split) {
  const groups = new Map();
  for (const row of rows) {
    const name = nameIn(row, split);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  return [...groups].sort(([, one], [, other]) => sum(other, "cost_usd") - sum(one, "cost_usd"));
}

const columnsFor = (name, label) => [
  { name, label },
  ...MEASURES.map((measure) => ({ name: measure, label: LABELS[measure], has_total: true })),
];

function groupTable(rows, split, signal) {
  const lines = grouped(rows, split).map(([name, own]) => [name, ...MEASURES.map((measure) => sum(own, measure))]);
  if (!lines.length) return h("p", { class: "note" }, "Nothing was used in this range. Rows arrive a few seconds after their answers.");
  return dataTable(`Usage by ${SPLITS[split].toLowerCase()}`, columnsFor(split, SPLITS[split]), lines, signal);
}

function dayTable(rows, days, signal) {
  const lines = [...days].reverse().map((day) => {
    const own = rows.filter((row) => row.day === day);
    return [day, ...MEASURES.map((measure) => sum(own, measure))];
  });
  return dataTable("Usage by day", columnsFor("day", "Day"), lines, signal);
}

function buttons({ range, tenant }, rows) {
  const heads = ["day", "tenant", "key_id", "model", ...MEASURES];
  const name = `usage-${tenant === ALL ? "all" : tenant}-${range.first}-${range.last}`.replace(/[^\w.-]/g, "_");
  return [
    button("Print", () => window.print(), { class: "quiet" }),
    button("Save as CSV", () => saveCsv(name, heads, rows.map((row) => heads.map((head) => row[head]))), { class: "quiet" }),
  ];
}
