// Tables of numbers: pages of rows, totals, order by a click on a heading, and every row on paper.

import { h, put } from "./dom.js";
import { aligned, dollars } from "./money.js";
import { cellText, heading, unitOf, unitWords } from "./wording.js";

const PAGE = 25;
const MOST_PRINTED = 2000;
const LONG = 32;

/**
 * A table of a report.
 * @param {string} caption what it shows.
 * @param {object[]} columns `name`; `label` and `about` if they differ from what the name says; `has_total` if
 *   its sum is meaningful; `hrefOf` gives the address that a cell links to, or null.
 * @param {any[][]} rows values in the order of the columns.
 * @param {AbortSignal} signal ends the listener for paper.
 */
export function dataTable(caption, columns, rows, signal) {
  const isNumber = columns.map((_, at) => rows.some((row) => typeof row[at] === "number") && rows.every((row) => row[at] === null || typeof row[at] === "number"));
  const order = placed(columns, isNumber);
  const words = columns.map((column, at) => wordsOf(column, at, rows));
  const exact = columns.map(({ name }) => unitOf(name) === "money");
  const state = { first: 0, by: -1, down: false, all: false, isOpen: false, found: rows };
  const body = h("tbody");
  const foot = h("tfoot");
  const heads = order.map((at) => head(columns[at], isNumber[at], () => sort(at)));
  const move = (by) => {
    state.first += by;
    draw();
  };
  const open = () => {
    state.isOpen = !state.isOpen;
    state.first = 0;
    draw();
  };
  const pager = pages(move, open);
  const draw = () => {
    const { found } = state;
    const sorted = state.by < 0 ? found : [...found].sort(comparison(state.by, state.down));
    const shown = state.all || state.isOpen ? sorted.slice(0, MOST_PRINTED) : sorted.slice(state.first, state.first + PAGE);
    put(body, shown.map((row) => line(row, columns, words, order, isNumber, exact)));
    put(foot, totals(columns, words, order, found));
    order.forEach((at, place) => {
      const direction = state.by === at ? (state.down ? "descending" : "ascending") : null;
      if (direction) heads[place].setAttribute("aria-sort", direction);
      else heads[place].removeAttribute("aria-sort");
    });
    pager.draw(state.first, found.length, state.isOpen);
  };
  const sort = (at) => {
    state.down = state.by === at ? !state.down : isNumber[at];
    state.by = at;
    state.first = 0;
    draw();
  };
  const find = (text) => {
    const matches = (row) => order.some((at) => !isNumber[at] && words[at](row[at]).toLowerCase().includes(text));
    state.found = text ? rows.filter(matches) : rows;
    state.first = 0;
    draw();
  };
  printsAll(state, draw, signal);
  draw();
  return h(
    "div",
    { class: "data" },
    rows.length > PAGE && search(caption, find),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      h(
        "table",
        {},
        h("caption", { class: "hidden" }, caption),
        h("thead", {}, h("tr", {}, heads)),
        body,
        columns.some((column) => column.has_total) && foot,
      ),
    ),
    rows.length > PAGE && pager.element,
  );
}

/** Names and days first, then money, then the rest: what matters is left of the edge. */
function placed(columns, isNumber) {
  const rank = (at) => (isNumber[at] ? (unitOf(columns[at].name) === "money" ? 1 : 2) : 0);
  const leading = columns.findIndex((_, at) => isNumber[at]);
  // Texts behind the first number, such as an example, stay behind the numbers.
  const late = (at) => !isNumber[at] && leading >= 0 && at > leading;
  const places = columns.map((_, at) => at);
  return places.sort((a, b) => (late(a) ? 3 : rank(a)) - (late(b) ? 3 : rank(b)) || a - b);
}

function head(column, isNumber, sort) {
  const unit = unitWords(column.name);
  const label = column.label ?? heading(column.name);
  return h(
    "th",
    { scope: "col", class: isNumber && "number", title: column.about },
    h(
      "button",
      { type: "button", class: "sort", on: { click: sort } },
      label,
      unit && h("span", { class: "unit" }, ` (${unit})`),
    ),
  );
}

/** What writes the cells of a column for people. */
function wordsOf({ name, has_total: hasTotal }, at, rows) {
  if (unitOf(name) !== "money") return (value) => cellText(name, value);
  const values = rows.map((row) => row[at]).filter((value) => typeof value === "number");
  const sum = values.reduce((total, value) => total + value, 0);
  const write = aligned(hasTotal ? [...values, sum] : values);
  return (value) => (typeof value === "number" ? write(value) : cellText(name, value));
}

function line(row, columns, words, order, isNumber, exact) {
  return h(
    "tr",
    {},
    order.map((at, place) => {
      const text = words[at](row[at]);
      const kind = { class: isNumber[at] ? "number" : text.length > LONG ? "words wraps" : "words" };
      if (exact[at] && row[at]) kind.title = dollars(row[at]);
      const href = columns[at].hrefOf?.(row[at]);
      const content = href ? h("a", { href }, text) : text;
      return place ? h("td", kind, content) : h("th", { scope: "row", ...kind }, content);
    }),
  );
}

/** The sums of columns that may be added. */
function sums(columns, rows) {
  return columns.map(({ has_total: hasTotal }, at) =>
    hasTotal ? rows.reduce((sum, row) => sum + (row[at] ?? 0), 0) : null,
  );
}

function totals(columns, words, order, rows) {
  const sum = sums(columns, rows);
  return h(
    "tr",
    {},
    order.map((at, place) => {
      if (!place) return h("th", { scope: "row", class: "words" }, "Total");
      return sum[at] === null ? h("td", {}) : h("td", { class: "number" }, words[at](sum[at]));
    }),
  );
}

/** A field that leaves only the rows with a text in them. */
function search(caption, find) {
  const field = h("input", { type: "search", "aria-label": `Search: ${caption}`, placeholder: "Search", autocomplete: "off", spellcheck: "false" });
  field.addEventListener("input", () => find(field.value.trim().toLowerCase()));
  return h("div", { class: "labeled no-print" }, field);
}

function comparison(at, down) {
  const sign = down ? -1 : 1;
  return (one, other) => {
    const [a, b] = [one[at], other[at]];
    if (a === b) return 0;
    if (a === null) return 1;
    if (b === null) return -1;
    return (a < b ? -1 : 1) * sign;
  };
}

/** Buttons to the rows before and after. They stay, so that the keyboard can continue from them. */
function pages(move, open) {
  const turn = (label, by) => h("button", { type: "button", class: "quiet", on: { click: () => move(by) } }, label);
  const words = h("span", { class: "muted", "aria-live": "polite" });
  const back = turn("Previous", -PAGE);
  const on = turn("Next", PAGE);
  const all = h("button", { type: "button", class: "quiet", on: { click: open } });
  const draw = (first, total, isOpen) => {
    const last = Math.min(total, first + (isOpen ? MOST_PRINTED : PAGE));
    const focused = document.activeElement;
    words.textContent = total ? `${first + 1}–${last} of ${total}` : "No row matches.";
    back.hidden = first === 0;
    on.hidden = last === total || isOpen;
    all.hidden = total <= PAGE;
    all.textContent = isOpen ? `Show ${PAGE}` : "Show all";
    if (focused === back && back.hidden) on.focus();
    if (focused === on && on.hidden) back.focus();
  };
  return { element: h("div", { class: "pager no-print" }, words, back, on, all), draw };
}

function printsAll(state, draw, signal) {
  const set = (all) => () => {
    state.all = all;
    draw();
  };
  window.addEventListener("beforeprint", set(true), { signal });
  window.addEventListener("afterprint", set(false), { signal });
}
