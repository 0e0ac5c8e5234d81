// The view "Usage": what the tenant used and was charged.

import { call } from "./api.js";
import { h, put, table } from "./dom.js";
import { dollars } from "./money.js";
import { bars } from "./plot.js";
import { moment } from "./timing.js";

const DAYS = 30;
const DAY_S = 86_400;
const whole = new Intl.NumberFormat();

/** Shows the view. */
export async function show(place, _, signal) {
  put(place, h("h1", {}, "Usage"), h("p", { class: "muted" }, "Loading …"));
  const start = Math.floor(Date.now() / 1000) - (DAYS - 1) * DAY_S;
  const summary = await call("v1/usage", { signal });
  // A key with the scope admin would get the sum of all tenants, next to totals of its own.
  const own = encodeURIComponent(summary.tenant);
  const of = (path) =>
    call(
      `v1/organization/${path}?start_time=${start}&bucket_width=1d&limit=31&project_ids=${own}`,
      { signal },
    );
  const [costs, embeddings, images] = await Promise.all([
    of("costs"),
    of("usage/embeddings"),
    of("usage/images"),
  ]);
  put(
    place,
    h(
      "div",
      { class: "row between" },
      h("h1", {}, `Usage of ${summary.tenant}`),
      h("span", { class: "muted" }, `As of ${moment(summary.as_of)}, days in UTC`),
    ),
    h("div", { class: "tiles" }, tiles(summary)),
    h(
      "div",
      { class: "plots" },
      bars(
        "Cost",
        daily(costs, (result) => result.amount.value),
        dollars,
      ),
      bars(
        "Tokens",
        daily(embeddings, (result) => result.input_tokens),
        whole.format,
      ),
      bars(
        "Images",
        daily(images, (result) => result.images),
        whole.format,
      ),
    ),
    h("h2", {}, "This month by model"),
    table(
      "This month by model",
      ["Model", "Requests", "Refused", "Delivered", "From cache", "Device", "Cost"],
      [...summary.month.models, summary.month.total].map((one) => [
        one.model ?? h("b", {}, "All"),
        whole.format(one.requests),
        whole.format(one.refused),
        whole.format(one.succeeded),
        whole.format(one.cached),
        `${one.device_s.toFixed(1)} s`,
        dollars(one.cost_usd),
      ]),
    ),
  );
}

function tiles({ today, month, budget_usd_per_month: budget }) {
  const tile = (name, value, more) =>
    h(
      "div",
      { class: "card tile" },
      h("span", { class: "muted" }, name),
      h("b", {}, value),
      more && h("span", { class: "muted" }, more),
    );
  const requests = ({ total }) =>
    `${whole.format(total.requests)} ${total.requests === 1 ? "request" : "requests"}` +
    (total.refused ? `, ${whole.format(total.refused)} of them refused` : "");
  const spent = month.total.cost_usd;
  return [
    tile("Today", dollars(today.total.cost_usd), requests(today)),
    tile("This month", dollars(spent), requests(month)),
    budget !== null &&
      tile(
        "Budget",
        dollars(budget),
        `${Math.round((spent / Math.max(budget, 1e-9)) * 100)} % used`,
      ),
  ];
}

function daily(page, valueOf) {
  return page.data.map((bucket) => ({
    label: new Date(bucket.start_time * 1000).toISOString().slice(0, 10),
    value: bucket.results.reduce((sum, result) => sum + valueOf(result), 0),
  }));
}
