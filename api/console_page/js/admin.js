// What the pages for administrators share: who may see them, and what a key file can't do.

import { ApiError, call } from "./api.js";
import { h, put } from "./dom.js";

const REFUSALS = [403, 503];

/**
 * Shows a page for administrators, or why this key or this API has none.
 * @param {string} title of the page.
 * @param {function} fill gets whether the directory of keys is read-only, and returns what to show.
 */
export async function adminPage(place, title, signal, fill) {
  put(place, h("h1", {}, title), h("p", { class: "muted loading" }, "Loading …"));
  try {
    const { is_read_only: isReadOnly } = await call("v1/admin/keys?limit=1", { signal });
    put(place, h("h1", {}, title), isReadOnly && readOnlyNote(), await fill(isReadOnly));
  } catch (error) {
    if (!(error instanceof ApiError) || !REFUSALS.includes(error.status)) throw error;
    put(place, h("h1", {}, title), h("p", { class: "note" }, `${title} can't be shown: ${error.message}.`));
  }
}

const readOnlyNote = () =>
  h(
    "p",
    { class: "note" },
    "Keys, tenants and plans are in a file, which the API only reads: change them with ",
    h("code", {}, "penstock keys"),
    ", ",
    h("code", {}, "penstock tenants"),
    " and ",
    h("code", {}, "penstock plans"),
    ". The last use of keys is not recorded in a file.",
  );

/** A labeled control. */
export const field = (label, control, hint) =>
  h(
    "div",
    { class: "field" },
    h("label", { for: control.id }, label),
    control,
    hint && h("p", { class: "hint", id: `${control.id}-hint` }, hint),
  );

/** All plans by name. */
export async function plansByName(signal) {
  const { data } = await call("v1/admin/plans", { signal });
  return new Map(data.map(({ name, plan }) => [name, plan]));
}
