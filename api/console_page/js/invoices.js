// The view "Invoices": what a customer owes for a month, in lines that can be checked, and on paper.
// `#invoices/MONTH/NUMBER` is the address of one.

import { call } from "./api.js";
import { saveCsv } from "./csv.js";
import { badge, button, failure, h, put } from "./dom.js";
import { selection } from "./filters.js";
import { openedMonth, plusDays, today, zone } from "./ranges.js";

const MONTHS = 13;
const KINDS = {
  computed: "Computed",
  cached: "From the cache",
  failed: "Failed, not charged",
  expired: "Too late, not charged",
  canceled: "Canceled",
};
const HEADS = ["position", "model", "kind", "items", "quantity", "unit", "unit_price_usd", "price_per", "charged_share", "amount_usd"];
const COLUMNS = ["Invoice", "Customer", "State"];
const AMOUNTS = ["Before tax", "Tax", "Amount due"];
const whole = new Intl.NumberFormat("en-US");

/** Shows the view. */
export async function show(place, [wanted, number], signal) {
  const tz = zone();
  const month = /^\d{4}-\d{2}$/.test(wanted ?? "") ? wanted : openedMonth(tz);
  const shown = h("div", { class: "stack" }, h("p", { class: "muted" }, "Loading …"));
  put(
    place,
    h("h1", { class: number && "hidden" }, "Invoices"),
    h(
      "div",
      { class: "card filters no-print" },
      selection("invoice-month", "Month", months(tz), month, (chosen) => {
        location.hash = `invoices/${chosen}`;
      }),
      h("span", { class: "muted" }, `Months of ${tz}`),
    ),
    shown,
  );
  try {
    const { data, rules } = await call(`v1/invoices?${new URLSearchParams({ month, tz })}`, { signal });
    const one = data.find((invoice) => invoice.number === number) ?? (data.length === 1 ? data[0] : null);
    put(shown, one ? sheet(one, rules, data.length > 1) : list(data, month));
  } catch (error) {
    if (!signal.aborted) put(shown, failure(error));
  }
}

function months(tz) {
  const names = {};
  let first = `${today(tz).slice(0, 7)}-01`;
  for (let count = 0; count < MONTHS; count += 1) {
    names[first.slice(0, 7)] = monthInWords(first.slice(0, 7));
    first = `${plusDays(first, -1).slice(0, 7)}-01`;
  }
  return names;
}

function monthInWords(month) {
  const words = new Intl.DateTimeFormat("en-US", { month: "long", year: "numeric", timeZone: "UTC" });
  return words.format(new Date(`${month}-01T00:00Z`));
}

/** A day in words, such as `December 1, 2026`. */
function dayInWords(day) {
  return new Intl.DateTimeFormat("en-US", { dateStyle: "long", timeZone: "UTC" }).format(new Date(`${day}T00:00Z`));
}

/** The unit price in words, such as `$0.02 per image`. */
function unitPrice({ unit, unit_price_usd: price, price_per: per }) {
  if (price === null) return "–";
  return `${usd(price)} per ${per === 1 ? unit.replace(/s$/, "") : "million"}`;
}

/** A decimal in text with its currency and grouped digits. It is not made a number, which might round it. */
function usd(text) {
  const [whole, decimals = ""] = text.replace("-", "").split(".");
  const sign = text.startsWith("-") ? "-" : "";
  return `${sign}$${whole.replace(/\B(?=(\d{3})+$)/g, ",")}.${decimals.replace(/0+$/, "").padEnd(2, "0")}`;
}

/** Before tax, tax and due, rounded to cents. */
const amounts = ({ net_usd: net, tax, due_usd: due }) => [net ?? due, tax?.amount_usd ?? "0", due];

/** A sum of decimals in cents, without the errors of floating point. */
function sumOf(decimals) {
  const cents = decimals.reduce((sum, text) => sum + BigInt(Math.round(Number(text) * 100)), 0n).toString().padStart(3, "0");
  return `${cents.slice(0, -2)}.${cents.slice(-2)}`;
}

function list(data, month) {
  if (!data.length) return h("p", { class: "note" }, `Nothing was used in ${monthInWords(month)}, so there is no invoice.`);
  const rows = data.map((one) =>
    h(
      "tr",
      {},
      h("th", { scope: "row", "data-head": COLUMNS[0] }, h("a", { href: `#invoices/${month}/${encodeURIComponent(one.number)}` }, one.number)),
      h("td", { "data-head": COLUMNS[1] }, one.tenant),
      h("td", { "data-head": COLUMNS[2] }, badge(one.is_final ? "final" : "preliminary")),
      amounts(one).map((amount, at) => h("td", { class: "number", "data-head": AMOUNTS[at] }, usd(amount))),
    ),
  );
  const heads = COLUMNS.map((text) => h("th", { scope: "col" }, text));
  const numbers = AMOUNTS.map((text) => h("th", { scope: "col", class: "number" }, text));
  const totals = AMOUNTS.map((head, at) => h("td", { class: "number", "data-head": head }, usd(sumOf(data.map((one) => amounts(one)[at])))));
  const foot = data.length > 1 && h("tfoot", {}, h("tr", {}, h("th", { scope: "row", colspan: heads.length }, "Total"), totals));
  return h(
    "div",
    { class: "data" },
    h(
      "div",
      { class: "scroll sheet-lines", tabindex: 0, role: "region", "aria-label": "Invoices" },
      h("table", {}, h("thead", {}, h("tr", {}, heads, numbers)), h("tbody", {}, rows), foot || null),
    ),
  );
}

function sheet(invoice, rules, hasOthers) {
  const { number, seller, tenant, month, tz, lines, is_final: isFinal, issued_on: issuedOn } = invoice;
  const last = plusDays(`${plusDays(`${month}-28`, 4).slice(0, 7)}-01`, -1);
  const facts = {
    "Invoice number": number,
    "Issued on": issuedOn ? dayInWords(issuedOn) : "not yet",
    "Billing period": `${dayInWords(`${month}-01`)} – ${dayInWords(last)}`,
    "Time zone": tz,
    Currency: "US dollars (USD)",
    State: isFinal ? "Final: the month has ended" : "Preliminary: the month has not ended",
  };
  return h(
    "article",
    { class: "card invoice", "aria-label": `Invoice ${number}` },
    h(
      "div",
      { class: "row between" },
      h("h2", { class: "title" }, `Invoice ${number}`),
      h(
        "span",
        { class: "row no-print" },
        hasOthers && h("a", { href: `#invoices/${month}` }, "All invoices"),
        button("Print or save as PDF", () => window.print(), { class: "quiet" }),
        button("Save as CSV", () => saveCsv(number, HEADS, lines.map((line) => HEADS.map((head) => line[head]))), { class: "quiet" }),
      ),
    ),
    h("div", { class: "parties" }, party("Seller", seller || "not set (PENSTOCK_INVOICE_SELLER)", !seller), party("Customer", tenant)),
    h("div", { class: "row between" }, h("dl", { class: "facts" }, Object.entries(facts).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])), h("p", { class: "due" }, h("span", { class: "muted" }, "Amount due"), h("b", {}, usd(invoice.due_usd)))),
    table(invoice),
    h("section", { class: "rules" }, h("h3", {}, "How the amounts are computed"), h("ol", {}, rules.map((rule) => h("li", {}, rule)))),
  );
}

/** A name and address. */
const party = (label, text, isMissing = false) =>
  h("div", {}, h("h3", { class: "muted" }, label), h("p", { class: isMissing ? "address muted" : "address" }, text));

function table({ lines, total_usd: total, net_usd: net, tax, due_usd: due }) {
  const heads = [["Model"], ["What"], ["Items", 1], ["Quantity", 1], ["Unit price", 1], ["Share charged", 1], ["Amount", 1]];
  const cells = (line) => [
    [`${line.model}`],
    [KINDS[line.kind] ?? line.kind],
    [whole.format(line.items), 1],
    [`${whole.format(line.quantity)} ${line.unit}`, 1],
    [unitPrice(line), 1],
    [`${Number((100 * Number(line.charged_share)).toFixed(4))} %`, 1],
    [usd(line.amount_usd), 1],
  ];
  const row = (name, words) => h("tr", {}, h("th", { scope: "row", colspan: heads.length - 1 }, name), h("td", { class: "number" }, words));
  return h(
    "div",
    { class: "data" },
    h(
      "div",
      { class: "scroll sheet-lines", tabindex: 0, role: "region", "aria-label": "Lines" },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, heads.map(([text, isNumber]) => h("th", { scope: "col", class: isNumber && "number" }, text)))),
        h("tbody", {}, lines.map((line) => h("tr", {}, cells(line).map(([words, isNumber], at) => h(at ? "td" : "th", { class: isNumber ? "number" : "words", scope: at ? null : "row", "data-head": heads[at][0] }, words))))),
        h("tfoot", {}, row("Total of the lines", usd(total)), tax && row("Rounded to a cent", usd(net)), tax && row(`${tax.name}, ${tax.percent} %`, usd(tax.amount_usd)), row(tax ? "Amount due" : "Amount due, rounded to a cent", usd(due))),
      ),
    ),
  );
}
