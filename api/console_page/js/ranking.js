// Bars of names, such as models or tenants: a line each, with the value at its end. It is a table, so it can be read out.

import { h } from "./dom.js";
import { colorOf } from "./series.js";
import { measured } from "./wording.js";

const MOST = 24;

/** Bars by name, largest first. Parts of a stacked bar are next to each other, others below each other. */
export function ranking(title, series, stacked, unit) {
  const size = (at) => Math.max(...series.map((one) => one.y[at] ?? 0));
  const sum = (at) => series.reduce((total, one) => total + (one.y[at] ?? 0), 0);
  const length = stacked ? sum : size;
  const order = series[0].x.map((_, at) => at).sort((a, b) => length(b) - length(a));
  const most = order.reduce((longest, at) => Math.max(longest, length(at)), 0);
  const rows = order.slice(0, MOST).map((at) => {
    const values = series.map((one) => one.y[at]);
    const cells = stacked
      ? [h("div", { class: "lane" }, bars(series, values, most, unit), h("b", {}, measured(sum(at), unit)))]
      : values.map((value, index) =>
          h("div", { class: "lane" }, bar(series[index].name, value, index, most, unit), h("b", {}, measured(value, unit))),
        );
    return h("tr", {}, h("th", { scope: "row", class: "long" }, series[0].x[at]), h("td", {}, cells));
  });
  const left = order.length - rows.length;
  return h(
    "div",
    { class: "ranking", role: "group", "aria-label": title },
    h("table", {}, h("tbody", {}, rows)),
    left > 0 && h("p", { class: "muted" }, `${left} more are in the table below.`),
  );
}

const bars = (series, values, most, unit) =>
  values.map((value, index) => (value ? bar(series[index].name, value, index, most, unit) : null));

function bar(name, value, index, most, unit) {
  const made = h("span", { class: `block ${colorOf(index)}`, title: `${name}: ${measured(value, unit)}` });
  made.style.flexBasis = `${most ? (100 * Math.max(0, value ?? 0)) / most : 0}%`;
  return made;
}
