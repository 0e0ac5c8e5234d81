// The view "Plans": the limits of tenants. For keys with the scope `admin`. `#plans/NAME` opens one to change it.

import { adminPage, field, plansByName } from "./admin.js";
import { call } from "./api.js";
import { button, failure, h, listing, put, sayThenOpen } from "./dom.js";
import { limitWords, planFields } from "./limits.js";
import { dollars } from "./money.js";

const DEFAULT = "default";
const linkTo = (name) => `#plans/${encodeURIComponent(name)}`;
const pathOf = (name) => `v1/admin/plans/${encodeURIComponent(name)}`;

/** Shows the view. */
export async function show(place, [wanted], signal) {
  await adminPage(place, "Plans", signal, async (isReadOnly) => {
    const told = h("div", { "aria-live": "polite" });
    const [plans, { data: tenants }] = await Promise.all([plansByName(signal), call("v1/admin/tenants", { signal })]);
    const users = new Map();
    for (const { plan } of tenants) users.set(plan ?? DEFAULT, (users.get(plan ?? DEFAULT) ?? 0) + 1);
    return [
      h("p", { class: "muted" }, `Tenants without a plan have the plan ${DEFAULT} if there is one, and otherwise no limits.`),
      told,
      list(plans, users, isReadOnly, told, signal),
      !isReadOnly && form(plans.has(wanted) ? wanted : "", plans, told, signal),
    ];
  });
}

function list(plans, users, isReadOnly, told, signal) {
  if (!plans.size) return h("p", { class: "note" }, "There are no plans yet, so no tenant has limits.");
  const rows = [...plans].map(([name, plan]) => {
    const { budget_usd_per_month: budget, ...others } = plan;
    const cells = [
      isReadOnly ? name : h("a", { href: linkTo(name), title: "Change it" }, name),
      users.get(name) ?? 0,
      (budget ?? null) === null ? "no limit" : dollars(budget),
      limitWords(others) || "none",
    ];
    return isReadOnly ? cells : [...cells, removal(name, told, signal)];
  });
  return listing("Plans", ["Plan", "Tenants", "Budget per month", "Other limits and terms", ...(isReadOnly ? [] : [""])], rows);
}

function removal(name, told, signal) {
  if (name === DEFAULT) return h("span", { class: "hint" }, "can be changed, but not removed");
  const remove = async () => {
    if (!confirm(`Remove the plan ${name}?`)) return;
    await call(pathOf(name), { method: "DELETE", signal });
    sayThenOpen(`The plan ${name} was removed.`, "#plans");
  };
  return button("Remove", remove, { class: "quiet danger", onError: (error) => put(told, failure(error)), "aria-label": `Remove ${name}` });
}

/** Changes a plan, or creates one. */
function form(chosen, plans, told, signal) {
  const name = h("input", { id: "plan-name", required: true, value: chosen, readonly: Boolean(chosen), autocomplete: "off" });
  const { element, read } = planFields(plans.get(chosen) ?? {});
  const submit = async (event) => {
    event.preventDefault();
    const wanted = name.value.trim();
    try {
      if (!chosen && plans.has(wanted)) throw new Error(`The plan ${wanted} exists: choose it in the list to change it.`);
      await call(pathOf(wanted), { method: "PUT", body: read(), signal });
      sayThenOpen(`The plan ${wanted} was ${chosen ? "changed" : "created"}.`, linkTo(wanted));
    } catch (error) {
      if (!signal.aborted) put(told, failure(error));
    }
  };
  const title = chosen ? `Change ${chosen}` : "New plan";
  return h(
    "form",
    { class: "card", "aria-label": title, on: { submit } },
    h("div", { class: "row between" }, h("h2", {}, title), chosen && h("a", { href: "#plans" }, "New plan")),
    h("div", { class: "fields narrow" }, field("Name", name)),
    element,
    h("p", { class: "hint" }, "Changes take effect within seconds."),
    h("button", { class: "main" }, chosen ? "Change plan" : "Create plan"),
  );
}
