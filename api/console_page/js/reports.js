// The view "Reports": what finance, product and operations read. A key sees what the API lets it.

import { call } from "./api.js";
import { button, download, failure, h, put, table } from "./dom.js";
import { drawing } from "./drawing.js";
import { amount, plain } from "./money.js";

const DAY_MS = 86_400_000;
const MOST_LINES = 500;
const CSV_PLACES = 12;
const number = new Intl.NumberFormat(undefined, { maximumFractionDigits: 6 });

/** Shows the list of reports, or the one that the address names. */
export async function show(place, [name], signal) {
  put(place, h("h1", {}, "Reports"), h("p", { class: "muted" }, "Loading …"));
  const { data } = await call("v1/reports", { signal });
  const chosen = data.find((one) => one.name === name);
  if (!chosen) {
    put(place, h("h1", {}, "Reports"), list(data));
    return;
  }
  const shown = h("div", { class: "stack", "aria-live": "polite" });
  put(
    place,
    h("p", { class: "no-print" }, h("a", { href: "#reports" }, "All reports")),
    h("h1", {}, worded(chosen.name)),
    h("p", { class: "muted" }, `${chosen.title} For ${chosen.owner}.`),
    question(chosen, shown, signal),
    shown,
  );
  await answer(chosen, shown, signal, defaults(chosen));
}

function list(data) {
  return table(
    "Reports",
    ["Report", "For", "Shows"],
    data.map((one) => [
      h("a", { href: `#reports/${encodeURIComponent(one.name)}` }, worded(one.name)),
      one.owner,
      one.title,
    ]),
  );
}

function defaults(chosen) {
  const day = (ms) => new Date(ms).toISOString().slice(0, 10);
  const now = Date.now();
  return {
    from: day(now - (chosen.days - 1) * DAY_MS),
    to: day(now + DAY_MS),
    tz: Intl.DateTimeFormat().resolvedOptions().timeZone ?? "UTC",
  };
}

function question(chosen, shown, signal) {
  const start = defaults(chosen);
  const field = (name, label, given) => [
    h("label", { for: `report-${name}` }, label),
    h("input", { id: `report-${name}`, name, ...given }),
  ];
  const ask = async (event) => {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(event.target));
    put(shown, h("p", { class: "muted" }, "Loading …"));
    try {
      await answer(chosen, shown, signal, given);
    } catch (error) {
      if (!signal.aborted) put(shown, failure(error));
    }
  };
  return h(
    "form",
    { class: "card question no-print", on: { submit: ask } },
    field("from", "From", { type: "date", value: start.from }),
    field("to", "Up to, without", { type: "date", value: start.to }),
    field("tz", "Time zone", { value: start.tz }),
    chosen.filters.includes("model") && field("model", "Model", { placeholder: "all" }),
    chosen.filters.includes("tenant") && field("tenant", "Tenant", { placeholder: "all" }),
    h("button", {}, "Show"),
  );
}

async function answer(chosen, shown, signal, given) {
  const query = new URLSearchParams(Object.entries(given).filter(([, value]) => value));
  const reply = await call(`v1/reports/${encodeURIComponent(chosen.name)}?${query}`, { signal });
  const heads = reply.columns.map((column) => column.name);
  const lines = reply.rows.slice(0, MOST_LINES);
  put(
    shown,
    h("p", { class: "muted" }, rangeOf(reply)),
    h("div", { class: "drawings" }, reply.plots.map(drawing)),
    lines.length
      ? table(chosen.title, heads, lines.map((row) => row.map((value, at) => cell(heads[at], value))))
      : h("p", { class: "note" }, "There are no rows."),
    lines.length < reply.rows.length &&
      h("p", { class: "muted" }, `The first ${MOST_LINES} of ${reply.rows.length} lines.`),
    h(
      "p",
      { class: "row no-print" },
      button("Print", () => window.print(), { class: "quiet" }),
      button("Save as CSV", () => save(chosen.name, heads, reply.rows), { class: "quiet" }),
    ),
    h(
      "details",
      {},
      h("summary", {}, "What the columns mean"),
      reply.notes && h("p", {}, reply.notes),
      h(
        "dl",
        { class: "facts" },
        reply.columns.map((column) => [h("dt", {}, column.name), h("dd", {}, column.about)]),
      ),
    ),
  );
}

/** The range that the API answered for. Reports of budgets and invoices cover whole months. */
function rangeOf({ since, until, tz }) {
  const words = (moment) => `${moment.slice(0, 16).replace("T", " ")} UTC`;
  return `From ${words(since)} to ${words(until)}, days of ${tz}.`;
}

const isMoney = (head, value) => typeof value === "number" && /_usd(_|$)/.test(head);

function cell(head, value) {
  if (value === null) return "-";
  if (isMoney(head, value)) return amount(value);
  return typeof value === "number" ? number.format(value) : String(value);
}

function save(name, heads, rows) {
  // A cell that begins like a formula is one to spreadsheets.
  const quoted = (value) => {
    const text = typeof value === "string" ? value.replace(/^[=+\-@\t\r]/, "'$&") : `${value ?? ""}`;
    return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  const written = (value, at) => (isMoney(heads[at], value) ? plain(value, CSV_PLACES) : value);
  const lines = [heads, ...rows.map((row) => row.map(written))].map((row) =>
    row.map(quoted).join(","),
  );
  download(new Blob([lines.join("\r\n")], { type: "text/csv" }), `${name}.csv`);
}

function worded(name) {
  const words = name.replaceAll("_", " ");
  return words[0].toUpperCase() + words.slice(1);
}
