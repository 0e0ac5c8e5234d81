// The view "Predictions": a list with filters, and one prediction.
// `#predictions?model=NAME&cursor=CURSOR` is the address of a page, and `#predictions/ID` that of a prediction.

import { call } from "./api.js";
import { badge, button, h, keepFocus, listing, put, say, sayThenOpen, table } from "./dom.js";
import { ENDS, follow } from "./follow.js";
import { againLink, summary } from "./history.js";
import { filtersOf, keepFocusOn, keyLink, listControls, ownScope, pageLinks, queryOf } from "./listing.js";
import { aligned, dollars } from "./money.js";
import { modelOf, obstaclesOf } from "./replay.js";
import { resultOf } from "./results.js";
import { copyLink } from "./share.js";
import { snippets } from "./snippets.js";
import { moment, timeBar } from "./timing.js";

const VIEW = "predictions";
const OPEN = ["starting", "processing"];
const STATES = [...OPEN, ...ENDS];
const FULL_PAGE = 10;
const HEADS = ["Created", "State", "Model", "Input", "Time", "Cost", "Key", ""];

/** Shows the view. */
export async function show(place, [id], signal, params) {
  await (id ? one(place, id, signal) : list(place, signal, params));
}

async function list(place, signal, params) {
  const rows = h("div", { class: "stack" }, h("p", { class: "muted loading" }, "Loading …"));
  const again = () => fill(rows, params, again, signal);
  const [scope, controls] = await Promise.all([ownScope(signal), listControls(VIEW, "Prediction", params, STATES, signal)]);
  put(
    place,
    h("div", { class: "row between" }, h("div", {}, h("h1", {}, "Predictions"), h("p", { class: "scope" }, scope)), button("Reload", again)),
    controls,
    rows,
  );
  await again();
}

/** Shows a page. Cancel and Reload draw it again, but not the controls above it. */
async function fill(rows, params, again, signal) {
  const { found, next } = await search(params, rows, signal);
  const acts = new Map(found.map(({ id }) => [id, h("div")]));
  const cost = aligned(found.map((prediction) => prediction.metrics.cost_usd));
  put(
    rows,
    found.length
      ? listing(
          "Predictions",
          HEADS,
          found.map((prediction) => row(prediction, cost, params, acts.get(prediction.id))),
        )
      : none(params),
    pageLinks(VIEW, params, "cursor", next),
  );
  // The schema of each model is needed for this, so the rows don't wait for it.
  const obstacles = await obstaclesOf(found, signal);
  for (const prediction of found) {
    put(acts.get(prediction.id), action(prediction, obstacles.get(prediction.id), signal, () => redraw(prediction, rows, again)));
  }
}

async function redraw(prediction, rows, again) {
  await again();
  keepFocusOn(linkTo(prediction), rows);
}

/** Reads a page. If few predictions match the filters, pages of the API are short, so it reads several. */
async function search(params, rows, signal) {
  const found = [];
  let cursor = params.get("cursor") ?? "";
  do {
    const { results, next } = await call(`v1/predictions?${queryOf(params, cursor && { cursor })}`, { signal });
    found.push(...results);
    cursor = next ? new URL(next).searchParams.get("cursor") : "";
    if (results.length) continue;
    put(rows, h("p", { class: "muted loading" }, "Searching older predictions …"));
  } while (cursor && found.length < FULL_PAGE);
  return { found, next: cursor };
}

function none(params) {
  if (params.get("cursor")) return h("p", { class: "note" }, "There are no older predictions, or they have expired.");
  if (Object.keys(filtersOf(params)).length) return h("p", { class: "note" }, "No prediction matches these filters.");
  return h("p", { class: "note" }, "There are no predictions yet. ", h("a", { href: "#try" }, "Try a model."));
}

function row(prediction, cost, params, act) {
  const { id, metrics } = prediction;
  const usd = metrics.cost_usd;
  return [
    h("div", {}, h("a", { href: linkTo(prediction) }, moment(prediction.created_at)), h("div", { class: "hint id", title: id }, id)),
    badge(prediction.status),
    modelOf(prediction),
    h(
      "div",
      {},
      h("span", { class: "clip", title: summary(prediction.input) }, summary(prediction.input)),
      prediction.error && h("span", { class: "hint clip", title: prediction.error }, prediction.error),
    ),
    timeBar(metrics, { isSmall: true }),
    usd === undefined ? "–" : h("span", { class: "whole", title: dollars(usd) }, cost(usd)),
    keyLink(VIEW, params, prediction.api_key_id),
    act,
  ];
}

/** Cancels an open prediction, or creates a finished one again unless there is an obstacle. */
function action(prediction, obstacle, signal, again = null) {
  const { id, status } = prediction;
  const path = `v1/predictions/${encodeURIComponent(id)}`;
  if (!OPEN.includes(status)) {
    if (obstacle) return h("span", { class: "hint" }, refusal(obstacle));
    return button("Retry", () => retry(prediction, signal), { class: "quiet", "aria-label": `Retry ${id}` });
  }
  const cancel = async () => {
    const { status: ended } = await call(`${path}/cancel`, { method: "POST", signal });
    await again();
    say(ended === "canceled" ? "The prediction was canceled." : `The prediction has already ${ended}.`);
  };
  return button("Cancel", cancel, { class: "quiet", "aria-label": `Cancel ${id}` });
}

const refusal = (obstacle) => `Can't be retried: ${obstacle}.`;

/** Creates a prediction with the same input and a new ID, and opens it. */
async function retry({ model, input }, signal) {
  const created = await call("v1/predictions", { method: "POST", body: { version: model, input }, signal });
  sayThenOpen("The prediction was created.", linkTo(created));
}

const linkTo = ({ id }) => `#predictions/${encodeURIComponent(id)}`;

async function one(place, id, signal) {
  const path = `v1/predictions/${encodeURIComponent(id)}`;
  const back = h("p", {}, h("a", { href: `#${VIEW}` }, "All predictions"));
  put(place, back, h("h1", { class: "long" }, id));
  const prediction = await found(path, id, place, signal);
  if (prediction.tenant !== undefined) {
    put(place, back, ...operatorsView(prediction));
    return;
  }
  const obstacle = (await obstaclesOf([prediction], signal)).get(prediction.id);
  const isOpen = OPEN.includes(prediction.status);
  const outcome = h("div", { class: "stack" });
  if (!isOpen) {
    put(outcome, h("div", { class: "card" }, h("h2", {}, "Result"), resultOf(prediction, signal)));
  }
  put(
    place,
    back,
    h(
      "div",
      { class: "row between" },
      h("h1", { class: "long" }, prediction.id),
      h(
        "div",
        { class: "row" },
        badge(prediction.status),
        copyLink(prediction.id),
        !isOpen && !obstacle && h("a", { href: againLink(modelOf(prediction), prediction.id) }, "Change and retry"),
        !isOpen && !obstacle && action(prediction, "", signal),
      ),
    ),
    h(
      "div",
      { class: "columns" },
      outcome,
      h(
        "div",
        { class: "stack" },
        h(
          "div",
          { class: "card" },
          facts(prediction),
          h("h2", {}, "Input"),
          h("pre", { class: "code", tabindex: 0 }, JSON.stringify(prediction.input, null, 2)),
          !isOpen && h("p", { class: "hint" }, obstacle ? refusal(obstacle) : "Retry sends this input again, without a webhook or context."),
        ),
        !obstacle && snippets({ version: prediction.model, input: prediction.input }),
      ),
    ),
  );
  if (!isOpen) return;
  await follow(path, outcome, signal);
  say("The prediction ended.");
  await one(place, id, signal);
  keepFocus();
}

/** Reads a prediction. If it is not of the key's tenant, an operator gets it without its input and output. */
async function found(path, id, place, signal) {
  try {
    return await call(path, { signal });
  } catch (error) {
    if (![403, 404].includes(error.status)) throw error;
    const ofAnyTenant = await readAsOperator(id, signal);
    if (ofAnyTenant) return ofAnyTenant;
    if (error.status === 404) {
      const { username } = await call("v1/account", { signal });
      place.append(h("p", { class: "note" }, `This key finds only predictions of tenant ${username}, until they expire. For another tenant's prediction, log in with a key of that tenant.`));
    }
    throw error;
  }
}

/** Null: the key lacks the scope `admin`, or there is no such prediction. */
async function readAsOperator(id, signal) {
  try {
    return await call(`v1/admin/predictions/${encodeURIComponent(id)}`, { signal });
  } catch (error) {
    if (signal.aborted || ![403, 404].includes(error.status)) throw error;
    return null;
  }
}

function operatorsView(prediction) {
  const { metrics } = prediction;
  const told = {
    Tenant: prediction.tenant,
    Key: prediction.api_key_id ?? "–",
    ID: prediction.id,
    Endpoint: prediction.endpoint ?? "/v1/predictions",
    Version: prediction.version,
    Attempts: String(prediction.attempts),
    "Error code": prediction.error_code ?? "–",
    Worker: prediction.worker ?? "–",
    Device: prediction.device ?? "–",
  };
  return [
    h("div", { class: "row between" }, h("h1", { class: "long" }, prediction.request_id), badge(prediction.status)),
    h("p", { class: "note" }, `This prediction belongs to tenant ${prediction.tenant}. Its input, output, logs, and error message are shown only to keys of that tenant.`),
    h("div", { class: "card stack" }, facts(prediction, told), timeBar(metrics)),
    metrics.steps && table("Steps", ["Step", "Model", "Items", "Failed", "Cost"], metrics.steps.map((step) => [step.id, step.model, step.items, step.failed, dollars(step.cost_usd)])),
  ];
}

function facts(prediction, more = {}) {
  const told = {
    ...more,
    Model: prediction.model,
    Created: moment(prediction.created_at),
    Started: moment(prediction.started_at),
    Completed: moment(prediction.completed_at),
    Deadline: moment(prediction.deadline),
    Cost: prediction.metrics.cost_usd === undefined ? "–" : dollars(prediction.metrics.cost_usd),
  };
  return h(
    "dl",
    { class: "facts" },
    Object.entries(told).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}
