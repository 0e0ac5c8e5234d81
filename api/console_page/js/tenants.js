// The view "Tenants": their plans, budgets and what they spent this month. For keys with the scope `admin`.

import { adminPage, field, plansByName } from "./admin.js";
import { call, reportRows } from "./api.js";
import { badge, button, failure, h, keepFocus, listing, put, say } from "./dom.js";
import { addressOf } from "./listing.js";
import { dollars } from "./money.js";
import { today } from "./ranges.js";
import { moment } from "./timing.js";

const DEFAULT = "default";
const setLabel = (name) => `Set the plan of ${name}`;
const freezeLabel = (name, isFrozen) => `${isFrozen ? "Freeze" : "Unfreeze"} ${name}`;

/** Shows the view. */
export async function show(place, _, signal) {
  await adminPage(place, "Tenants", signal, async (isReadOnly) => {
    const told = h("div", { "aria-live": "polite" });
    const listed = h("div", { class: "stack" });
    const spent = await spending(signal);
    const load = async () => {
      const [{ data }, plans] = await Promise.all([call("v1/admin/tenants", { signal }), plansByName(signal)]);
      const set = async (name, plan) => {
        await call(`v1/admin/tenants/${encodeURIComponent(name)}`, { method: "PUT", body: { plan: plan || null }, signal });
        put(told);
        await load();
        say(`The plan of ${name} was set.`);
        [...listed.querySelectorAll("button")].find((one) => one.getAttribute("aria-label") === setLabel(name))?.focus();
      };
      const freeze = async (name, isFrozen) => {
        if (isFrozen && !confirm(`Reject all requests of ${name} and pause its batches? Its data is kept.`)) return;
        await call(`v1/admin/tenants/${encodeURIComponent(name)}`, { method: "PUT", body: { frozen: isFrozen }, signal });
        put(told);
        await load();
        say(isFrozen ? `${name} is frozen. Its requests are rejected within 5 s.` : `${name} is no longer frozen.`);
        [...listed.querySelectorAll("button")].find((one) => one.getAttribute("aria-label") === freezeLabel(name, !isFrozen))?.focus();
      };
      put(listed, list(data, plans, spent, isReadOnly, { set, freeze }, told), !isReadOnly && other(plans, set, told));
      keepFocus();
    };
    await load();
    return [
      h("p", { class: "muted" }, "Budgets are for calendar months in UTC, and come from plans. A tenant exists once it has a key or a plan."),
      spent.error && h("p", { class: "note" }, `What tenants spent can't be shown: ${spent.error.message}.`),
      told,
      listed,
    ];
  });
}

/** What each tenant spent this month, or why that can't be known. */
async function spending(signal) {
  try {
    const rows = await reportRows("budgets", { from: `${today("UTC").slice(0, 7)}-01` }, signal);
    return { byTenant: new Map(rows.map((row) => [row.tenant, row])) };
  } catch (error) {
    if (signal.aborted) throw error;
    return { byTenant: new Map(), error };
  }
}

function list(tenants, plans, spent, isReadOnly, acts, told) {
  if (!tenants.length) return h("p", { class: "note" }, "There are no tenants yet.");
  const heads = ["Tenant", "State", "Plan", "Budget per month", ...(spent.error ? [] : ["Spent this month", "End of the month (estimate)"])];
  return listing(
    "Tenants",
    heads,
    tenants.map((tenant) => row(tenant, plans, spent, isReadOnly, acts, told)),
  );
}

function row({ name, plan, frozen_at: frozenAt }, plans, spent, isReadOnly, { set, freeze }, told) {
  const budget = plans.get(plan ?? DEFAULT)?.budget_usd_per_month ?? null;
  const state = h(
    "div",
    {},
    h("div", { class: "row tight" }, badge(frozenAt === null ? "active" : "frozen"), !isReadOnly && freezing(name, frozenAt === null, freeze, told)),
    frozenAt !== null && h("div", { class: "hint" }, `since ${moment(frozenAt)}`),
  );
  const cells = [
    h("a", { href: addressOf("keys", { tenant: name }), title: "Its keys" }, name),
    state,
    isReadOnly ? (plan ?? `none (${DEFAULT})`) : planChoice(name, plan, plans, set, told),
    budget === null ? "no limit" : dollars(budget),
  ];
  if (spent.error) return cells;
  const { spent_usd: usd = 0, month_end_usd: end = 0 } = spent.byTenant.get(name) ?? {};
  const meter = budget !== null && budget > 0 && h("progress", { max: budget, value: Math.min(usd, budget), "aria-label": `Budget of ${name} that is spent` });
  const share = budget !== null && budget > 0 && h("span", { class: "hint" }, ` ${Math.round((100 * usd) / budget)} %`);
  return [...cells, h("span", {}, h("span", { title: dollars(usd) }, dollars(usd)), share, h("div", {}, meter)), dollars(end)];
}

function options(plans, chosen) {
  return [h("option", { value: "", selected: chosen === null }, `none (${DEFAULT})`), ...[...plans.keys()].map((plan) => h("option", { value: plan, selected: plan === chosen }, plan))];
}

function planChoice(name, plan, plans, set, told) {
  const select = h("select", { "aria-label": `Plan of ${name}` }, options(plans, plan));
  const onError = (error) => put(told, failure(error));
  return h("div", { class: "row tight" }, select, button("Set", () => set(name, select.value), { class: "quiet", onError, "aria-label": setLabel(name) }));
}

function freezing(name, isActive, freeze, told) {
  const given = { class: isActive ? "quiet danger" : "quiet", onError: (error) => put(told, failure(error)), "aria-label": freezeLabel(name, isActive) };
  return button(isActive ? "Freeze" : "Unfreeze", () => freeze(name, isActive), given);
}

/** A form for a tenant that has no keys yet. */
function other(plans, set, told) {
  const name = h("input", { id: "tenant-name", required: true, autocomplete: "off" });
  const plan = h("select", { id: "tenant-plan" }, options(plans, null));
  const submit = async (event) => {
    event.preventDefault();
    try {
      await set(name.value.trim(), plan.value);
    } catch (error) {
      put(told, failure(error));
    }
  };
  return h(
    "form",
    { class: "card", "aria-label": "Plan of another tenant", on: { submit } },
    h("h2", {}, "Plan of another tenant"),
    h("div", { class: "fields narrow" }, field("Tenant", name), field("Plan", plan)),
    h("button", { class: "main" }, "Set plan"),
  );
}
