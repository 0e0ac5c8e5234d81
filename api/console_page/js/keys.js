// The view "Keys": for keys with the scope `admin`. `#keys?tenant=NAME&after=ID` is the address of a page.

import { adminPage, field } from "./admin.js";
import { call } from "./api.js";
import { badge, button, copyButton, failure, h, keepFocus, listing, put, say } from "./dom.js";
import { limitWords } from "./limits.js";
import { addressOf } from "./listing.js";
import { moment } from "./timing.js";

const PAGE = 100;
const SECONDS_PER_DAY = 86_400;
const SCOPES = [
  "all",
  "read",
  "embeddings",
  "images",
  "audio",
  "ocr",
  "text",
  "predictions",
  "files",
  "batches",
  "usage",
  "admin",
];

/** Shows the view. */
export async function show(place, _, signal, params) {
  await adminPage(place, "Keys", signal, async (isReadOnly) => {
    const issued = h("div", { "aria-live": "polite" });
    const listed = h("div", { class: "stack" });
    const load = async () => put(listed, await page(params, isReadOnly, issued, reload, signal));
    const reload = async () => {
      try {
        await load();
      } catch (error) {
        // Not in `issued`: that may have a secret, which is shown only once.
        if (!signal.aborted) put(listed, failure(error));
      }
      keepFocus();
    };
    await load();
    return [tenantFilter(params), issued, listed, !isReadOnly && (await creation(params, issued, reload, signal))];
  });
}

function tenantFilter(params) {
  const tenant = h("input", { id: "filter-tenant", value: params.get("tenant") ?? "", placeholder: "All", autocomplete: "off" });
  const submit = (event) => {
    event.preventDefault();
    location.hash = addressOf("keys", tenant.value.trim() ? { tenant: tenant.value.trim() } : {});
  };
  return h(
    "form",
    { class: "card filters", "aria-label": "Filters", on: { submit } },
    h("span", { class: "labeled" }, h("label", { for: tenant.id }, "Tenant"), tenant, h("button", { class: "quiet" }, "Filter")),
    params.get("tenant") && h("a", { href: "#keys" }, "Clear"),
  );
}

async function page(params, isReadOnly, issued, load, signal) {
  const [tenant, after] = [params.get("tenant") ?? "", params.get("after") ?? ""];
  const query = new URLSearchParams({ limit: PAGE, ...(tenant && { tenant }), ...(after && { after }) });
  const { data, has_more: hasMore, last_id: last } = await call(`v1/admin/keys?${query}`, { signal });
  const heads = ["Name", "Tenant", "Key", "State", "Scopes", "Models", "Limits", "Created", !isReadOnly && "Last used", "Expires", !isReadOnly && ""];
  return [
    data.length
      ? listing("Keys", heads.filter((head) => head !== false), data.map((key) => row(key, isReadOnly, issued, load, signal)))
      : h("p", { class: "note" }, "There are no keys here."),
    (after || hasMore) &&
      h(
        "nav",
        { class: "pager", "aria-label": "Pages" },
        after && h("a", { href: addressOf("keys", tenant ? { tenant } : {}) }, "First"),
        hasMore && h("a", { href: addressOf("keys", { ...(tenant && { tenant }), after: last }) }, "Next"),
      ),
  ];
}

function row(key, isReadOnly, issued, load, signal) {
  const cells = [
    key.name,
    h("a", { href: addressOf("keys", { tenant: key.tenant }) }, key.tenant),
    h("code", { class: "long" }, key.redacted_value),
    badge(key.state),
    h("div", { class: "scopes" }, key.scopes.map((scope) => h("span", { class: "whole" }, scope))),
    key.models ? key.models.join(", ") : "all",
    limitWords(key.limits) || "–",
    moment(key.created_at),
  ];
  const expires = key.expires_at === null ? "never" : moment(key.expires_at);
  if (isReadOnly) return [...cells, expires];
  return [...cells, key.last_used_at === null ? "not yet" : moment(key.last_used_at), expires, key.state === "valid" ? actions(key, issued, load, signal) : ""];
}

function actions(key, issued, load, signal) {
  const path = `v1/admin/keys/${encodeURIComponent(key.id)}`;
  const onError = (error) => put(issued, failure(error));
  const rotate = async () => {
    if (!confirm(`Give the key ${key.name} a new secret? The old one works for another day.`)) return;
    showOnce(issued, await call(`${path}/rotate`, { method: "POST", body: {}, signal }));
    await load();
  };
  const revoke = async () => {
    if (!confirm(`Revoke the key ${key.name}? This can't be undone.`)) return;
    await call(path, { method: "DELETE", signal });
    // A secret on the page may be that of this key.
    put(issued);
    say(`The key ${key.name} was revoked.`);
    await load();
  };
  return h(
    "div",
    { class: "row" },
    button("Rotate", rotate, { class: "quiet", onError, "aria-label": `Rotate ${key.name}` }),
    button("Revoke", revoke, { class: "quiet danger", onError, "aria-label": `Revoke ${key.name}` }),
  );
}

async function creation(params, issued, load, signal) {
  const [{ data: tenants }, { data: models }] = await Promise.all([call("v1/admin/tenants", { signal }), call("v1/models", { signal })]);
  const tenant = h("input", { id: "new-tenant", required: true, autocomplete: "off", list: "tenants", value: params.get("tenant") });
  const name = h("input", { id: "new-name", required: true, autocomplete: "off" });
  const days = h("input", { id: "new-days", type: "number", min: 1, max: 3660, step: 1, placeholder: "never" });
  const budget = h("input", { id: "new-budget", type: "number", min: 0, step: "any", placeholder: "that of the plan" });
  const rate = h("input", { id: "new-rate", type: "number", min: 1, step: 1, placeholder: "that of the plan" });
  const scopes = boxes(SCOPES, ["all"]);
  const allowed = boxes(models.map(({ id }) => id), []);
  const chosen = (list) => list.filter((box) => box.checked).map((box) => box.value);
  const read = () => {
    const limits = {
      ...(budget.value && { budget_usd_per_month: Number(budget.value) }),
      ...(rate.value && { requests_per_min: Number(rate.value) }),
    };
    return {
      tenant: tenant.value.trim(),
      name: name.value.trim(),
      scopes: chosen(scopes),
      models: chosen(allowed).length ? chosen(allowed) : null,
      limits: Object.keys(limits).length ? limits : null,
      expires_in_s: days.value ? Number(days.value) * SECONDS_PER_DAY : null,
    };
  };
  let isRunning = false;
  const submit = async (event) => {
    event.preventDefault();
    // A second key would hide the secret of the first.
    if (isRunning) return;
    isRunning = true;
    try {
      showOnce(issued, await call("v1/admin/keys", { method: "POST", body: read(), signal }));
      name.value = "";
      await load();
    } catch (error) {
      if (!signal.aborted) put(issued, failure(error));
    } finally {
      isRunning = false;
    }
  };
  return h(
    "form",
    { class: "card", "aria-label": "New key", on: { submit } },
    h("h2", {}, "New key"),
    h("datalist", { id: "tenants" }, tenants.map((one) => h("option", { value: one.name }))),
    h(
      "div",
      { class: "fields narrow" },
      field("Tenant", tenant),
      field("Name", name),
      field("Expires in days", days),
      field("Monthly budget (USD)", budget),
      field("Requests per minute", rate),
    ),
    h("fieldset", { class: "row" }, h("legend", {}, "Scopes"), scopes.map((box) => h("label", { class: "check" }, box, box.value))),
    h(
      "fieldset",
      { class: "row choices-many" },
      h("legend", {}, "Models"),
      h("p", { class: "hint" }, "If none is chosen, the key may use all models."),
      allowed.map((box) => h("label", { class: "check" }, box, box.value)),
    ),
    h("button", { class: "main" }, "Create key"),
  );
}

const boxes = (values, checked) => values.map((value) => h("input", { type: "checkbox", value, checked: checked.includes(value) }));

function showOnce(issued, key) {
  const secret = h("code", { class: "long secret", tabindex: 0 }, key.value);
  put(issued, h("div", { class: "note" }, h("p", {}, `The key ${key.name}. It is not shown again:`), h("div", { class: "row" }, secret, copyButton("Copy key", "The key", key.value, secret))));
  secret.focus();
}
