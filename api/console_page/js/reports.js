// The view "Reports": what finance, product and operations read. A key sees what the API lets it.
// `#reports/NAME/RANGE/MODEL/TENANT` is the address of an answer.

import { call, send } from "./api.js";
import { chart } from "./chart.js";
import { saveCsv } from "./csv.js";
import { button, download, failure, h, put } from "./dom.js";
import { rangeChoice } from "./filters.js";
import { predictionHref } from "./listing.js";
import { PRESETS, asked, openedRange, plusDays, rangeOf, today, zone } from "./ranges.js";
import { dataTable } from "./tables.js";
import { capital, heading, titleOf } from "./wording.js";

const OWNERS = { finance: "Finance", product: "Product", operations: "Operations" };
const MOST_DAYS = 400;

/** Shows the list of reports, or the one that the address names. */
export async function show(place, [name, rangeName, model, tenant], signal) {
  put(place, h("h1", {}, "Reports"), h("p", { class: "muted loading" }, "Loading …"));
  const { data } = await call("v1/reports", { signal });
  const isAdmin = data.some((one) => one.audience === "operators");
  const report = data.find((one) => one.name === name);
  if (!report) {
    put(place, h("h1", {}, "Reports"), h("p", { class: "muted" }, scopeOf(isAdmin)), ...lists(data));
    return;
  }
  const tz = zone();
  const chosen = { report, range: rangeFor(report, rangeName, tz), model: model ?? "", tenant: tenant ?? "" };
  const shown = h("div", { class: "stack" }, h("p", { class: "muted loading" }, "Loading …"));
  put(
    place,
    h("p", { class: "no-print" }, h("a", { href: "#reports" }, "All reports")),
    h("div", {}, h("h1", {}, titleOf(report.name)), h("p", { class: "muted" }, report.title)),
    filters(chosen, isAdmin),
    shown,
  );
  try {
    await answer(chosen, isAdmin, tz, shown, signal);
  } catch (error) {
    if (!signal.aborted) put(shown, failure(error));
  }
}

const scopeOf = (isAdmin) =>
  isAdmin ? "This key may read the rows of all tenants." : "All numbers are those of this key's tenant.";

function lists(data) {
  return Object.entries(OWNERS).map(([owner, label]) => {
    const own = data.filter((one) => one.owner === owner);
    if (!own.length) return null;
    return h(
      "section",
      { class: "stack", "aria-label": label },
      h("h2", {}, label),
      h("ul", { class: "cards" }, own.map(entry)),
    );
  });
}

const entry = (one) =>
  h(
    "li",
    { class: "card" },
    h("a", { href: `#reports/${encodeURIComponent(one.name)}` }, titleOf(one.name)),
    h("p", { class: "muted" }, one.title),
    one.audience === "operators" && h("p", { class: "hint" }, "For administrators"),
  );

/** The range of a report that is opened from the list. Those of whole months begin with this one. */
function usual({ days }) {
  if (days === 1) return "this-month";
  if (days === 7 || days === 30) return `${days}-days`;
  return `${plusDays(today(), 1 - Math.min(days, MOST_DAYS))}..${today()}`;
}

/** Reports of the usual ranges open with the range that was chosen last. */
function rangeFor(report, name, tz) {
  const usually = usual(report);
  return name || Object.hasOwn(PRESETS, usually) ? openedRange(name, usually, tz) : rangeOf(usually, tz);
}

function addressOf({ report, range, model, tenant }) {
  return `#reports/${[report.name, range.name, model, tenant].map(encodeURIComponent).join("/")}`.replace(/\/+$/, "");
}

function filters(chosen, isAdmin) {
  const go = (change) => {
    location.hash = addressOf({ ...chosen, ...change });
  };
  const names = chosen.report.filters.filter((name) => name === "model" || isAdmin);
  const fields = names.map((name) => h("input", { id: `report-${name}`, value: chosen[name], placeholder: "all", autocomplete: "off" }));
  const submit = (event) => {
    event.preventDefault();
    go(Object.fromEntries(names.map((name, at) => [name, fields[at].value.trim()])));
  };
  return h(
    "div",
    { class: "card filters no-print" },
    rangeChoice(
      chosen.range,
      (name) => addressOf({ ...chosen, range: { name } }),
      (name) => go({ range: { name } }),
    ),
    names.length > 0 &&
      h(
        "form",
        { class: "row", on: { submit } },
        names.map((name, at) => h("span", { class: "labeled" }, h("label", { for: `report-${name}` }, capital(name)), fields[at])),
        h("button", { class: "quiet" }, "Filter"),
      ),
  );
}

async function answer({ report, range, model, tenant }, isAdmin, tz, shown, signal) {
  const query = new URLSearchParams({ ...asked(range, tz), ...(model && { model }), ...(tenant && { tenant }) });
  const reply = await call(`v1/reports/${encodeURIComponent(report.name)}?${query}`, { signal });
  const heads = reply.columns.map((column) => column.name);
  put(
    shown,
    h(
      "div",
      { class: "row between" },
      h("p", { class: "scope" }, rangeInWords(reply, isAdmin, tenant)),
      h(
        "div",
        { class: "row no-print" },
        button("Print", () => window.print(), { class: "quiet" }),
        button("Save as CSV", () => saveCsv(report.name, heads, reply.rows), { class: "quiet" }),
        button("Save as Parquet", () => saveParquet(report.name, query, signal), { class: "quiet" }),
      ),
    ),
    h("div", { class: "drawings" }, reply.plots.map((plot) => chart(plot))),
    reply.rows.length
      ? dataTable(report.title, reply.columns.map(linked), reply.rows, signal)
      : h("p", { class: "note" }, "There are no rows in this range."),
    about(report, range, reply, { model, tenant, tz }),
  );
}

/** A column, whose request IDs link to predictions. */
const linked = (column) => (column.name === "example_request_id" ? { ...column, hrefOf: predictionHref } : column);

async function saveParquet(name, query, signal) {
  const file = await send(`v1/reports/${encodeURIComponent(name)}?${query}&format=parquet`, { signal });
  download(await file.blob(), `${name}.parquet`);
}

/** The range that the API answered for. Reports of budgets and invoices cover whole months. */
function rangeInWords({ since, until, tz }, isAdmin, tenant) {
  const words = (moment) => `${moment.slice(0, 16).replace("T", " ")} UTC`;
  const who = tenant ? `Tenant ${tenant}` : isAdmin ? "All tenants" : "This key's tenant";
  return `${who} · from ${words(since)} to ${words(until)} · days of ${tz}`;
}

function about(report, range, reply, { model, tenant, tz }) {
  const { from, to } = asked(range, tz);
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const command = [
    `penstock report ${report.name} --from ${from} --to ${to} --tz ${tz}`,
    model && `--model ${quoted(model)}`,
    tenant && `--tenant ${quoted(tenant)}`,
    `--format parquet --output ${report.name}.parquet`,
  ];
  return h(
    "details",
    { class: "no-print" },
    h("summary", {}, "What the columns mean"),
    reply.notes && h("p", {}, reply.notes),
    h(
      "dl",
      { class: "facts" },
      reply.columns.map((column) => [h("dt", {}, heading(column.name)), h("dd", {}, h("code", {}, column.name), ` ${column.about}`)]),
    ),
    h("p", {}, "The same as a Parquet file, in a terminal of an operator:"),
    h("pre", { class: "code", tabindex: 0 }, command.filter(Boolean).join(" ")),
  );
}
