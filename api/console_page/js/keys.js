// The view "Keys": for keys with the scope `admin`.

import { ApiError, call } from "./api.js";
import { badge, button, failure, h, put, say, table } from "./dom.js";
import { moment } from "./timing.js";

const PAGE = 100;
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
export async function show(place, _, signal) {
  put(place, h("h1", {}, "Keys"));
  const issued = h("div", { "aria-live": "polite" });
  const listed = h("div", { class: "stack" });
  const load = async () => put(listed, ...(await pages(signal, issued, load)));
  try {
    await load();
  } catch (error) {
    if (!(error instanceof ApiError) || ![403, 503].includes(error.status)) throw error;
    place.append(h("p", { class: "note" }, `Keys can't be shown: ${error.message}.`));
    return;
  }
  place.append(issued, listed, creation(issued, load, signal));
}

async function pages(signal, issued, load) {
  const found = [];
  for (let after = ""; ;) {
    const query = after ? `&after=${encodeURIComponent(after)}` : "";
    const page = await call(`v1/admin/keys?limit=${PAGE}${query}`, { signal });
    found.push(
      table(
        "Keys",
        ["Name", "Tenant", "Key", "State", "Scopes", "Last used", "Expires", ""],
        page.data.map((key) => row(key, issued, load, signal)),
      ),
    );
    if (!page.has_more) return found;
    after = page.last_id;
  }
}

function row(key, issued, load, signal) {
  const path = `v1/admin/keys/${encodeURIComponent(key.id)}`;
  const onError = (error) => put(issued, failure(error));
  const rotate = button(
    "Rotate",
    async () => {
      if (!confirm(`Give the key ${key.name} a new secret? The old one works for another day.`))
        return;
      showOnce(issued, await call(`${path}/rotate`, { method: "POST", body: {}, signal }));
      await load();
    },
    { class: "quiet", onError, "aria-label": `Rotate ${key.name}` },
  );
  const revoke = button(
    "Revoke",
    async () => {
      if (!confirm(`Revoke the key ${key.name}? This can't be undone.`)) return;
      await call(path, { method: "DELETE", signal });
      say(`The key ${key.name} was revoked.`);
      await load();
    },
    { class: "quiet danger", onError, "aria-label": `Revoke ${key.name}` },
  );
  const scopes = key.scopes.join(", ") + (key.models ? ` · ${key.models.join(", ")}` : "");
  return [
    key.name,
    key.tenant,
    h("code", {}, key.redacted_value),
    badge(key.state),
    scopes,
    moment(key.last_used_at),
    key.expires_at === null ? "never" : moment(key.expires_at),
    key.state === "valid" ? h("div", { class: "row" }, rotate, revoke) : "",
  ];
}

function creation(issued, load, signal) {
  const tenant = h("input", { id: "new-tenant", required: true, autocomplete: "off" });
  const name = h("input", { id: "new-name", required: true, autocomplete: "off" });
  const days = h("input", {
    id: "new-days",
    type: "number",
    min: 1,
    max: 3660,
    step: 1,
    placeholder: "never",
  });
  const boxes = SCOPES.map((scope) =>
    h("input", { type: "checkbox", value: scope, checked: scope === "all" }),
  );
  const submit = async (event) => {
    event.preventDefault();
    const body = {
      tenant: tenant.value.trim(),
      name: name.value.trim(),
      scopes: boxes.filter((box) => box.checked).map((box) => box.value),
      expires_in_s: days.value ? Number(days.value) * 86_400 : null,
    };
    try {
      showOnce(issued, await call("v1/admin/keys", { method: "POST", body, signal }));
      name.value = "";
      await load();
    } catch (error) {
      if (!signal.aborted) put(issued, failure(error));
    }
  };
  return h(
    "form",
    { class: "card", on: { submit } },
    h("h2", {}, "New key"),
    h(
      "div",
      { class: "fields narrow" },
      h("div", { class: "field" }, h("label", { for: "new-tenant" }, "Tenant"), tenant),
      h("div", { class: "field" }, h("label", { for: "new-name" }, "Name"), name),
      h("div", { class: "field" }, h("label", { for: "new-days" }, "Expires in days"), days),
    ),
    h(
      "fieldset",
      { class: "row" },
      h("legend", {}, "Scopes"),
      boxes.map((box) => h("label", { class: "check" }, box, box.value)),
    ),
    h("button", { class: "main" }, "Create key"),
  );
}

function showOnce(issued, key) {
  put(
    issued,
    h(
      "div",
      { class: "note" },
      h("p", {}, `The key ${key.name}. It is not shown again:`),
      h("code", { class: "long secret", tabindex: 0 }, key.value),
    ),
  );
}
