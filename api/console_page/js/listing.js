// Filters of lists, in the address: `#predictions?model=NAME&status=failed`. The API gets them under the same names.

import { call } from "./api.js";
import { h, keepFocus } from "./dom.js";
import { selection } from "./filters.js";

const FILTERS = ["model", "status", "api_key_id", "created_after", "created_before"];
const TIMES = { created_after: "From", created_before: "To" };
const MS_PER_MIN = 60_000;
/** Keys are pk_live_ID_SECRET (shared/tenants/api_key.py). Addresses are kept in histories, so they must not have one. */
const KEY_ID = "[0-9A-Za-z]{12}";
const NO_KEY = "(?!.*pk_live_).*";
const ZONE = /(Z|[+\-]\d{2}(:?\d{2})?)$/i;

/** Address of a list with these parameters. */
export function addressOf(view, params) {
  const query = new URLSearchParams(params).toString();
  return query ? `#${view}?${query}` : `#${view}`;
}

/** The address of a prediction with this request ID. Null: the request created no prediction. */
export const predictionHref = (id) => (/^(pred|own)_/.test(id) ? `#predictions/${encodeURIComponent(id)}` : null);

/** The address of the same list, with one filter changed. Pages begin anew. */
export function addressWith(view, params, name, value) {
  return addressOf(view, { ...filtersOf(params), [name]: value });
}

/** Whose entries a list has. */
export async function ownScope(signal) {
  return `Tenant ${(await call("v1/account", { signal })).username}`;
}

/** The filters in an address. */
export function filtersOf(params) {
  return Object.fromEntries(FILTERS.map((name) => [name, params.get(name)]).filter(([, value]) => value));
}

/** The query for the API: filters, and further parameters. */
export function queryOf(params, more) {
  return new URLSearchParams({ include: "api_key_id", ...filtersOf(params), ...more });
}

/**
 * The controls above a list: a search by ID, and a form with the filters.
 * @param {string} view its name in addresses.
 * @param {string} kind an entry, in words.
 * @param {string[]} states to choose from.
 */
export async function listControls(view, kind, params, states, signal) {
  const { data } = await call("v1/models", { signal });
  const names = data.map((model) => model.id);
  return h("div", { class: "card filters no-print" }, search(view, kind), filterForm(view, params, states, names));
}

function search(view, kind) {
  const field = h("input", { id: "find-id", required: true, pattern: NO_KEY, title: `The ID of a ${kind.toLowerCase()}, never an API key`, autocomplete: "off", spellcheck: "false" });
  const submit = (event) => {
    event.preventDefault();
    location.hash = `#${view}/${encodeURIComponent(field.value.trim())}`;
  };
  return h(
    "form",
    { class: "row", role: "search", on: { submit } },
    h("span", { class: "labeled" }, h("label", { for: field.id }, `${kind} ID`), field),
    h("button", { class: "quiet" }, "Find"),
  );
}

function filterForm(view, params, states, models) {
  const chosen = filtersOf(params);
  const given = { ...chosen };
  const keep = (name) => (value) => {
    given[name] = value;
  };
  const options = (values, value) => ({ "": "All", ...Object.fromEntries([...new Set([...values, ...(value ? [value] : [])])].map((one) => [one, one])) });
  const key = h("input", {
    id: "filter-key",
    value: chosen.api_key_id ?? "",
    placeholder: "All",
    pattern: KEY_ID,
    title: "The 12 letters and digits after pk_live_, never the whole key",
    autocomplete: "off",
    spellcheck: "false",
  });
  const times = Object.entries(TIMES).map(([name, label]) => timeField(name, label, chosen[name]));
  const submit = (event) => {
    event.preventDefault();
    given.api_key_id = key.value.trim();
    for (const { name, read } of times) given[name] = read();
    location.hash = addressOf(view, Object.fromEntries(Object.entries(given).filter(([, value]) => value)));
  };
  return h(
    "form",
    { class: "row", "aria-label": "Filters", on: { submit } },
    selection("filter-model", "Model", options(models, chosen.model), chosen.model ?? "", keep("model")),
    selection("filter-status", "State", options(states, chosen.status), chosen.status ?? "", keep("status")),
    h("span", { class: "labeled" }, h("label", { for: key.id }, "Key ID"), key),
    times.map(({ element }) => element),
    h("button", { class: "quiet" }, "Filter"),
    Object.keys(chosen).length > 0 && h("a", { href: `#${view}` }, "Clear"),
  );
}

/** A time to the minute. Addresses have it in UTC, so that a link means the same time everywhere. */
function timeField(name, label, value) {
  const input = h("input", { id: `filter-${name}`, type: "datetime-local", value: value ? localOf(value) : "" });
  const element = h("span", { class: "labeled" }, h("label", { for: input.id }, label), input);
  // An untouched field keeps what the address has, which may be more exact.
  const read = () => {
    if (input.value === input.defaultValue) return value ?? "";
    return input.value && `${new Date(input.value).toISOString().slice(0, 16)}Z`;
  };
  return { name, element, read };
}

/** A time of the API for a field. Without a time zone, it is in UTC. */
function localOf(value) {
  const at = new Date(value.includes("T") && !ZONE.test(value) ? `${value}Z` : value);
  if (Number.isNaN(at.getTime())) return "";
  return new Date(at.getTime() - at.getTimezoneOffset() * MS_PER_MIN).toISOString().slice(0, 16);
}

/** Links to the newest and to older entries. Null without either. */
export function pageLinks(view, params, position, next) {
  if (!params.get(position) && !next) return null;
  const filters = filtersOf(params);
  return h(
    "nav",
    { class: "pager no-print", "aria-label": "Pages" },
    params.get(position) && h("a", { href: addressOf(view, filters) }, "Newest"),
    next && h("a", { href: addressOf(view, { ...filters, [position]: next }) }, "Older"),
  );
}

/** Moves the focus to the link of an entry, or to the view, if the element that had it is gone. */
export function keepFocusOn(href, place) {
  if (document.activeElement !== document.body) return;
  [...place.querySelectorAll("a")].find((link) => link.getAttribute("href") === href)?.focus();
  keepFocus();
}

/** The ID of a key, as a link to its entries. */
export function keyLink(view, params, id) {
  return id ? h("a", { class: "whole", href: addressWith(view, params, "api_key_id", id) }, id) : "–";
}
