// Controls above numbers: range, time zone and further choices. They only change the address.

import { h, put } from "./dom.js";
import { PRESETS } from "./ranges.js";

/** A longer list gets a search. */
export const MOST_WITHOUT_SEARCH = 20;

/** Links to the presets, and two days for any other range. `go` gets the name of the chosen range. */
export function rangeChoice(range, hrefOf, go) {
  const links = Object.entries(PRESETS).map(([name, label]) =>
    h("a", { href: hrefOf(name), "aria-current": name === range.name && "true" }, label),
  );
  const day = (name, label, value) => {
    const input = h("input", { id: `range-${name}`, type: "date", required: true, value });
    return { input, element: h("span", { class: "labeled" }, h("label", { for: input.id }, label), input) };
  };
  const from = day("from", "From", range.first);
  const to = day("to", "To", range.last);
  const submit = (event) => {
    event.preventDefault();
    go(`${from.input.value}..${to.input.value}`);
  };
  return [
    h("nav", { class: "choices", "aria-label": "Range" }, links),
    h("form", { class: "row", on: { submit } }, from.element, to.element, h("button", { class: "quiet" }, "Show")),
  ];
}

/** Links of which one is chosen. `options` are labels by name. */
export function choice(label, options, chosen, hrefOf) {
  const links = Object.entries(options).map(([name, text]) =>
    h("a", { href: hrefOf(name), "aria-current": name === chosen && "true" }, text),
  );
  return h("nav", { class: "choices", "aria-label": label }, h("span", { class: "muted" }, `${label} `), links);
}

/** A list to choose from. `go` gets the chosen value. */
export function selection(id, label, options, chosen, go) {
  const select = h(
    "select",
    { id, on: { change: () => go(select.value) } },
    Object.entries(options).map(([value, text]) => h("option", { value, selected: value === chosen }, text)),
  );
  return h("span", { class: "labeled" }, h("label", { for: id }, label), searchable(select, label));
}

/** A list with a search before it if it is long. Enter chooses the first match. */
export function searchable(select, label) {
  const options = [...select.options];
  if (options.length <= MOST_WITHOUT_SEARCH) return select;
  const matching = () => options.filter((option) => option.text.toLowerCase().includes(search.value.trim().toLowerCase()));
  const narrow = () => {
    // The chosen option stays, because a list without it would choose another one.
    const chosen = select.value;
    const matches = matching();
    put(select, options.filter((option) => option.value === chosen || matches.includes(option)));
    select.value = chosen;
  };
  const choose = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    const [first] = search.value.trim() ? matching() : [];
    if (!first) return;
    search.value = "";
    narrow();
    select.value = first.value;
    select.dispatchEvent(new Event("change"));
  };
  const given = { type: "search", "aria-label": `Search: ${label}`, placeholder: "Search, then Enter", autocomplete: "off", spellcheck: "false" };
  const search = h("input", { ...given, on: { input: narrow, keydown: choose } });
  return [search, select];
}
