// The view "Overview": requests, errors, latency, spend and budgets of a range next to the one before it, and the queue now.
// `#overview/RANGE` is its address.

import { ApiError, call, hasKey, reportRows } from "./api.js";
import { chart } from "./chart.js";
import { badge, failure, h, put } from "./dom.js";
import { rangeChoice } from "./filters.js";
import { addressOf, predictionHref } from "./listing.js";
import { POLL_MS, pace, wait } from "./live.js";
import { dollars } from "./money.js";
import { DAY_MS, asked, daysBetween, daysInWords, plusDays, rangeOf, today, zone } from "./ranges.js";
import { modelOf } from "./replay.js";
import { dataTable } from "./tables.js";
import { duration } from "./timing.js";
import { count } from "./wording.js";

const VIEW = "overview";
const USUAL = "7-days";
const REFRESH_MS = 60_000;
/** Refreshing a range of more than a week costs more, and changes less. */
const LONG_DAYS = 7;
const LONG_REFRESH_MS = 300_000;
const MS_PER_MIN = 60_000;
const HOUR_MS = 3_600_000;
const FAILED = ["failed", "expired", "refused"];
const NO_MODEL = "(none)";
const BY_RANGE = ["daily", "usage", "latency", "errors"];
const LAST_HOUR = ["Errors, last hour", "p95, last hour", "Workers"];
const QUEUE = ["Your items in flight", "Your waiting predictions", "Expected wait (estimate)", "Throughput"];
const COUNT_MS = 10_000;
const MOST_QUEUES = 15;
const LONG_NAME = 32;
const MOST_TRIES = 10;
const PAUSE_MS = 1000;

/** Shows the view. */
export async function show(place, [rangeName], signal) {
  const tz = zone();
  const range = rangeOf(rangeName || USUAL, tz);
  const scope = h("p", { class: "scope" });
  const figures = h("div", { class: "stack" }, h("p", { class: "muted loading" }, "Loading …"));
  const now = h("div", { class: "stack" });
  put(
    place,
    h("div", {}, h("h1", {}, "Overview"), scope),
    h(
      "div",
      { class: "card filters no-print" },
      rangeChoice(
        range,
        (name) => `#${VIEW}/${encodeURIComponent(name)}`,
        (name) => {
          location.hash = `#${VIEW}/${encodeURIComponent(name)}`;
        },
      ),
    ),
    now,
    figures,
  );
  const [{ username }, isAdmin] = await Promise.all([call("v1/account", { signal }), readsAllTenants(signal)]);
  scope.textContent = scopeOf(username, isAdmin, range, tz);
  const seen = { lastHour: null, waiting: null };
  const queue = followQueue(now, { isAdmin, tenant: username, seen }, signal);
  const counting = isAdmin && followLastHour(now, seen, signal);
  await Promise.all([queue, counting, followFigures(figures, { range, tz, isAdmin }, signal)]);
}

/** True for a key with the `admin` scope. A key without the `usage` scope reads no reports at all. */
async function readsAllTenants(signal) {
  try {
    const { data } = await call("v1/reports", { signal });
    return data.some((report) => report.audience === "operators");
  } catch (error) {
    if (error.status === 403) return false;
    throw error;
  }
}

function scopeOf(tenant, isAdmin, range, tz) {
  const own = hasKey() ? `Only tenant ${tenant}, to which this key belongs` : `Tenant ${tenant}`;
  const who = isAdmin ? "All tenants, because this key has the admin scope" : own;
  const before = previousOf(range, tz);
  return `${who} · ${daysInWords(range.first, range.last)} · compared with ${daysInWords(before.first, before.last)} · days in ${tz}`;
}

/** The range before, of the same length. If a range ends today, both end at this time of day. */
function previousOf({ first, last }, tz) {
  const days = daysBetween(first, last).length;
  const before = { first: plusDays(first, -days), last: plusDays(last, -days) };
  const query = asked(before, tz);
  if (last >= today(tz)) query.to = new Date(Date.now() - days * DAY_MS).toISOString();
  return { ...before, query };
}

/** Calls `work` again and again while the page is visible. A call is left out while the last one runs. */
function repeat(work, everyMs, signal) {
  let isRunning = false;
  const timer = setInterval(async () => {
    if (document.hidden || isRunning) return;
    isRunning = true;
    await work();
    isRunning = false;
  }, everyMs);
  signal.addEventListener("abort", () => clearInterval(timer));
}

async function followQueue(place, { isAdmin, tenant, seen }, signal) {
  const told = h("div");
  const body = h("tbody");
  const words = h("span", { class: "muted" });
  const all = h("button", { type: "button", class: "quiet" });
  const pager = h("div", { class: "pager no-print", hidden: true }, words, all);
  put(place, h("h2", {}, "Now"), h("p", { class: "muted" }, aboutNow(isAdmin, tenant)), told, h("div", { class: "data" }, queueTable(isAdmin, body), pager));
  let statuses = [];
  let isOpen = false;
  const draw = () => {
    const shown = isOpen ? statuses : statuses.slice(0, MOST_QUEUES);
    put(body, shown.map((status) => queueRow(status, isAdmin, seen)));
    pager.hidden = statuses.length <= MOST_QUEUES;
    words.textContent = isOpen ? `${count(statuses.length)} models` : `${count(shown.length)} of ${count(statuses.length)} models: those that are busy or failing first`;
    all.textContent = isOpen ? `Show ${MOST_QUEUES}` : "Show all";
  };
  all.addEventListener("click", () => {
    isOpen = !isOpen;
    draw();
  });
  const poll = async () => {
    try {
      statuses = mostUrgent((await call("v1/status", { signal })).data, seen);
      draw();
      put(told);
    } catch (error) {
      if (!signal.aborted) put(told, failure(error));
    }
  };
  const recount = async () => {
    seen.waiting = await waitingPredictions(signal);
  };
  await poll();
  // With many predictions, the count takes longer than everything else.
  await recount();
  await poll();
  repeat(poll, POLL_MS, signal);
  repeat(recount, COUNT_MS, signal);
}

/** The tenant's predictions that no worker has started, by model. The API's queue doesn't count them. Null: not known. */
async function waitingPredictions(signal) {
  try {
    const { results, next } = await call("v1/predictions?status=starting", { signal });
    const counts = new Map();
    for (const model of results.map(modelOf)) counts.set(model, (counts.get(model) ?? 0) + 1);
    return { counts, isAll: !next };
  } catch {
    // The key has no scope for predictions, or Redis is unreachable.
    return null;
  }
}

/** Models that are busy, that predictions wait for, or that fail come first. */
function mostUrgent(statuses, { lastHour, waiting }) {
  const isBusy = ({ model, is_busy: busy }) => Number(busy || waiting?.counts.has(model) || false);
  const errors = ({ model }) => lastHour?.get(model)?.errors ?? 0;
  return statuses.sort((one, other) => isBusy(other) - isBusy(one) || errors(other) - errors(one) || other.your_items_in_flight - one.your_items_in_flight);
}

function queueTable(isAdmin, body) {
  const head = (text) => h("th", { scope: "col", class: text !== "Model" && text !== "Queue" && "number" }, text);
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Queue and workers now" },
    h("table", {}, h("thead", {}, h("tr", {}, ["Model", "Queue", ...(isAdmin ? LAST_HOUR : []), ...QUEUE].map(head))), body),
  );
}

function aboutNow(isAdmin, tenant) {
  const queue = `Updated every ${POLL_MS / 1000} s by the API instance that responds. Items in flight and waits are for tenant ${tenant}; “–” means not known.`;
  return isAdmin
    ? `${queue} Errors, p95, and workers are for all tenants, counted every minute. Workers are those that ran batches in this hour or the previous one.`
    : `${queue} Only keys with the admin scope see the number of workers.`;
}

function queueRow(status, isAdmin, { lastHour, waiting }) {
  const waits = waiting?.counts.get(status.model) ?? 0;
  // Others than the newest were not counted.
  const isUnknown = waiting !== null && !waiting.isAll && !waits;
  // Predictions wait in the broker, which this estimate does not cover.
  const expectedS = waits || isUnknown ? null : status.expected_wait_s;
  const numbers = [
    ...(isAdmin ? lastHourCells(lastHour?.get(status.model), lastHour !== null) : []),
    count(status.your_items_in_flight),
    waiting && !isUnknown ? waitingLink(status.model, waits, waiting.isAll) : "–",
    expectedS === null ? h("span", { title: wait(null) }, "–") : wait(expectedS),
    status.items_per_s === null ? h("span", { title: pace(null) }, "–") : pace(status.items_per_s),
  ];
  return h(
    "tr",
    {},
    h("th", { scope: "row", class: status.model.length > LONG_NAME ? "words wraps" : "words" }, status.model),
    h("td", {}, badge(status.is_busy || waits ? "busy" : isUnknown ? "unknown" : "idle")),
    numbers.map((cell) => h("td", { class: "number" }, cell)),
  );
}

function waitingLink(model, waits, isAll) {
  if (!waits) return "0";
  return h("a", { href: addressOf("predictions", { model, status: "starting" }) }, `${count(waits)}${isAll ? "" : " or more"}`);
}

function lastHourCells(model, isKnown) {
  if (!isKnown) return ["–", "–", "–"];
  const { errors = 0, p95 = null, workers = 0 } = model ?? {};
  return [errors ? h("span", { class: "badge bad" }, count(errors)) : "0", p95 === null ? "–" : duration(p95), workers || "none"];
}

async function followFigures(place, chosen, signal) {
  const before = { ...previousOf(chosen.range, chosen.tz), readAt: new Date(), reports: new Map() };
  let drawn = new AbortController();
  const draw = async () => {
    // Ends the listeners of the tables that the next drawing replaces.
    const next = new AbortController();
    try {
      const read = (name, query) => readReport(name, query, signal);
      put(place, figures(await readFigures(chosen, before, read), { ...chosen, before }, AbortSignal.any([signal, next.signal])));
    } catch (error) {
      if (!signal.aborted) put(place, failure(error));
    }
    drawn.abort();
    drawn = next;
  };
  await draw();
  if (chosen.range.last < today(chosen.tz)) return;
  // A table that someone reads or has sorted with the keyboard stays as it is.
  repeat(async () => place.contains(document.activeElement) || draw(), refreshMs(chosen.range), signal);
}

const refreshMs = ({ first, last }) => (daysBetween(first, last).length > LONG_DAYS ? LONG_REFRESH_MS : REFRESH_MS);

/** Reads the reports of a range and, unless it was read earlier, of the one before. */
async function readFigures({ range, tz }, before, read) {
  const found = {};
  const current = asked(range, tz);
  for (const name of BY_RANGE) {
    const earlier = before.reports.get(name) ?? resultOf(read(name, before.query));
    const [now, was] = await Promise.all([resultOf(read(name, current)), earlier]);
    found[name] = { now, was };
    if (was.rows) before.reports.set(name, was);
  }
  // By default, the report begins a day ago, which may be in the previous month.
  found.budgets = await resultOf(read("budgets", { from: `${today("UTC").slice(0, 7)}-01` }));
  return found;
}

/** The rows of a report, or the error that its section shows. Errors that concern every section are thrown. */
async function resultOf(reading) {
  try {
    return { rows: await reading };
  } catch (error) {
    if (!(error instanceof ApiError) || error.status === 401 || error.status === 403) throw error;
    return { error };
  }
}

/** A section drawn from the rows of some reports, or why there is none. `remedy` is for too many rows, if it is not a shorter range. */
function section(results, draw, remedy = "") {
  const error = results.find((result) => result.error)?.error;
  if (!error) return draw(...results.map(({ rows }) => rows));
  const reason = remedy && error.status === 400 ? `it has too many rows; ${remedy}` : error.message;
  return failure(new Error(`This section can't be shown: ${reason}`));
}

function figures({ daily, usage, latency, errors, budgets }, { range, tz, isAdmin, before }, signal) {
  const modelReports = [usage, latency, errors].flatMap(({ now, was }) => [now, was]);
  const models = modelReports.some(({ error }) => error)
    ? []
    : byModel(
        { usage: usage.now.rows, latency: latency.now.rows, errors: errors.now.rows },
        { usage: usage.was.rows, latency: latency.was.rows, errors: errors.was.rows },
      );
  const days = [daily.now, daily.was];
  return [
    h("h2", {}, daysInWords(range.first, range.last)),
    h("p", { class: "muted" }, `From the rows of requests, as of ${new Date().toLocaleTimeString()}. ${renewal(range, tz, before)}`),
    section(days, (now, was) => [
      h("div", { class: "tiles" }, tiles(now, was, models, budgets, isAdmin)),
      h("div", { class: "drawings" }, drawings(range, now, before, was)),
    ]),
    h("h2", {}, "By model"),
    section(modelReports, () => modelTable(models, signal)),
    h("h2", {}, "Errors by reason"),
    section([errors.now], (rows) => errorTable(rows, signal)),
    isAdmin && [h("h2", {}, "Budgets this month"), section([budgets], (rows) => budgetTable(rows, signal), "choose a tenant in Reports")],
  ];
}

/** The rows of a report. A tenant may have four queries at a time, and those of a view that was left go on, so it waits its turn. */
async function readReport(name, query, signal) {
  for (let tries = 1; ; tries += 1) {
    try {
      return await reportRows(name, query, signal);
    } catch (error) {
      if (error.status !== 429 || tries === MOST_TRIES) throw error;
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  }
}

function renewal(range, tz, before) {
  if (range.last < today(tz)) return "";
  const everyMin = refreshMs(range) / MS_PER_MIN;
  const often = everyMin === 1 ? "every minute" : `every ${everyMin} minutes`;
  return `Rows arrive a few seconds after the answers; this page reads them ${often}. The previous range is as of ${before.readAt.toLocaleTimeString()}.`;
}

/** Reads errors, latency and workers of each model, whatever range is chosen. */
async function followLastHour(place, seen, signal) {
  const told = h("div");
  place.append(told);
  const recount = async () => {
    try {
      seen.lastHour = await readLastHour(signal);
      put(told);
    } catch (error) {
      if (signal.aborted) return;
      seen.lastHour = null;
      put(told, failure(new Error(`Errors, latency and workers can't be read: ${error.message}`)));
    }
  };
  await recount();
  repeat(recount, REFRESH_MS, signal);
}

async function readLastHour(signal) {
  const hour = Math.floor(Date.now() / HOUR_MS) * HOUR_MS;
  const since = new Date(Date.now() - HOUR_MS).toISOString();
  const batches = await readReport("batches", { from: new Date(hour - HOUR_MS).toISOString() }, signal);
  const errors = await readReport("errors", { from: since }, signal);
  const latency = await readReport("latency", { from: since }, signal);
  const found = new Map();
  const of = (name) => found.get(name) ?? found.set(name, { errors: 0, p95: null, workers: 0 }).get(name);
  for (const { model, workers } of batches) of(model).workers = Math.max(of(model).workers, workers);
  for (const { model, status, items } of errors) of(model).errors += FAILED.includes(status) ? items : 0;
  for (const { model, phase, p95_ms: p95 } of latency) if (phase === "total") of(model).p95 = p95;
  return found;
}

const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] ?? 0), 0);
const errorsOf = (days) => FAILED.reduce((total, status) => total + sum(days, status), 0);

function tiles(days, daysBefore, models, budgets, isAdmin) {
  const [requests, errors, spend] = [sum(days, "requests"), errorsOf(days), sum(days, "cost_usd")];
  const [first] = [...models].sort((one, other) => other.requests - one.requests);
  return [
    tile("Requests", count(requests), change(requests, sum(daysBefore, "requests"), count)),
    tile("Errors", count(errors), change(errors, errorsOf(daysBefore), count)),
    first?.p95_ms &&
      tile("Latency, p95", duration(first.p95_ms), `${first.model}, the most used model; ${change(first.p95_ms, first.p95_before_ms, duration)}`),
    tile("Spend", dollars(spend), change(spend, sum(daysBefore, "cost_usd"), dollars)),
    isAdmin ? budgetsTile(budgets) : budgetTile(budgets),
  ];
}

const tile = (name, value, more) =>
  h("div", { class: "card tile" }, h("span", { class: "muted" }, name), h("b", {}, value), h("span", { class: "muted" }, more));

/** A change in words. Null and 0 can't be compared. */
function change(now, before, words) {
  if (!before) return "none in the previous range";
  const percent = Math.round((100 * (now - before)) / before);
  if (!percent) return `as before (${words(before)})`;
  return `${percent > 0 ? "up" : "down"} ${count(Math.abs(percent))} % from ${words(before)}`;
}

function budgetTile({ rows, error }) {
  if (error) return tile("Budget this month", "–", error.message);
  const [budget] = rows;
  if (!budget || budget.budget_usd === null) return tile("Budget this month", "none", "no limit is set");
  const end = `${dollars(budget.month_end_usd)} by the end of the month (estimate)`;
  return tile("Budget this month", dollars(budget.budget_usd), `${Math.round(budget.percent)} % spent, ${end}; months in UTC`);
}

function budgetsTile({ rows, error }) {
  if (error) return tile("Budgets this month", "–", "see the section below");
  const limited = rows.filter((budget) => budget.budget_usd !== null);
  const near = limited.filter((budget) => budget.percent >= 80);
  return tile("Budgets this month", `${count(near.length)} of ${count(limited.length)}`, "tenants have spent 80 % or more; months in UTC");
}

function drawings(range, days, before, daysBefore) {
  const places = daysBetween(range.first, range.last);
  const placesBefore = daysBetween(before.first, before.last);
  const values = (rows, of, name) => {
    const byDay = new Map(rows.map((row) => [row.day, row[name]]));
    return of.map((day) => byDay.get(day) ?? 0);
  };
  const plot = (title, name, unit) =>
    chart({
      kind: "lines",
      title,
      unit,
      stacked: false,
      series: [
        { name: "This range", x: places, y: values(days, places, name) },
        { name: "Previous range", x: places, y: values(daysBefore, placesBefore, name) },
      ],
    });
  return [plot("Requests by day", "requests", ""), plot("Spend by day", "cost_usd", "US dollars")];
}

/** One entry per model of either range, the most expensive first. */
function byModel(current, before) {
  const names = new Set([...current.usage, ...before.usage, ...current.errors].map((row) => row.model ?? ""));
  return [...names]
    .map((name) => {
      const [now, was] = [current, before].map(({ usage, latency, errors }) => {
        const of = (rows) => rows.filter((row) => (row.model ?? "") === name);
        const total = of(latency).find((row) => row.phase === "total");
        return {
          requests: sum(of(usage), "requests"),
          errors: sum(of(errors).filter((row) => FAILED.includes(row.status)), "items"),
          items: sum(of(usage), "items") + sum(of(usage), "refused"),
          p50: total?.p50_ms ?? null,
          p95: total?.p95_ms ?? null,
          usd: sum(of(usage), "cost_usd"),
        };
      });
      return {
        model: name || NO_MODEL,
        requests: now.requests,
        requests_before: was.requests,
        errors: now.errors,
        errors_before: was.errors,
        error_percent: now.items ? (100 * now.errors) / now.items : null,
        p50_ms: now.p50,
        p95_ms: now.p95,
        p95_before_ms: was.p95,
        cost_usd: now.usd,
        before_usd: was.usd,
      };
    })
    .sort((one, other) => other.cost_usd - one.cost_usd || other.requests - one.requests);
}

const MODEL_COLUMNS = [
  { name: "model", label: "Model" },
  { name: "requests", label: "Requests", has_total: true },
  { name: "requests_before", label: "Previous requests", has_total: true },
  { name: "errors", label: "Errors", has_total: true, about: "items that failed or were late, and refused requests" },
  { name: "errors_before", label: "Previous errors", has_total: true },
  { name: "error_percent", label: "Errors", about: "share of items and refused requests" },
  { name: "p50_ms", label: "p50", about: "median time from receiving to replying" },
  { name: "p95_ms", label: "p95" },
  { name: "p95_before_ms", label: "Previous p95" },
  { name: "cost_usd", label: "Spend", has_total: true },
  { name: "before_usd", label: "Previous spend", has_total: true },
];

function modelTable(models, signal) {
  if (!models.length) return h("p", { class: "note" }, "There were no requests in either range.");
  const rows = models.map((model) => MODEL_COLUMNS.map(({ name }) => model[name]));
  return dataTable("Requests, errors, latency and spend by model", MODEL_COLUMNS, rows, signal);
}

const ERROR_COLUMNS = [
  { name: "model", label: "Model" },
  { name: "status", label: "State" },
  { name: "error_code", label: "Code" },
  { name: "items", label: "Items", has_total: true },
  { name: "latest", label: "Latest (UTC)" },
  { name: "example_request_id", label: "Request ID of the latest", hrefOf: predictionHref },
];

function errorTable(errors, signal) {
  const failed = errors.filter((row) => FAILED.includes(row.status));
  if (!failed.length) return h("p", { class: "note" }, "There were no errors in this range.");
  const rows = failed.map((row) => ERROR_COLUMNS.map(({ name }) => row[name]));
  return dataTable("Errors by reason", ERROR_COLUMNS, rows, signal);
}

const BUDGET_COLUMNS = [
  { name: "tenant", label: "Tenant" },
  { name: "spent_usd", label: "Spent", has_total: true },
  { name: "budget_usd", label: "Budget" },
  { name: "percent", label: "Spent (%)" },
  { name: "month_end_usd", label: "End of the month (estimate)" },
];

function budgetTable(budgets, signal) {
  if (!budgets.length) return h("p", { class: "note" }, "Nothing was spent this month.");
  const sorted = [...budgets].sort((one, other) => (other.percent ?? -1) - (one.percent ?? -1));
  const rows = sorted.map((row) => BUDGET_COLUMNS.map(({ name }) => row[name]));
  return dataTable("Budgets this month", BUDGET_COLUMNS, rows, signal);
}
