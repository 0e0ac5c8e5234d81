// The "Live" view: the load of the models, polled every two seconds while the page is visible.

import { call } from "./api.js";
import { badge, failure, h, put } from "./dom.js";
import { sparkline } from "./plot.js";
import { duration } from "./timing.js";

const POLL_MS = 2000;
const KEPT = 60;

/** Shows the view. */
export async function show(place, _, signal) {
  const cards = h("div", { class: "plots" });
  const told = h("div");
  put(
    place,
    h("h1", {}, "Live"),
    h(
      "p",
      { class: "muted" },
      "From the instance of the API that answers. Waits are estimates for your next item.",
    ),
    told,
    cards,
  );
  const history = new Map();
  const poll = async () => {
    try {
      const { data } = await call("v1/status", { signal });
      put(
        cards,
        data.map((status) => card(status, history)),
      );
      put(told);
    } catch (error) {
      if (!signal.aborted) put(told, failure(error));
    }
  };
  await poll();
  let isAsking = false;
  const timer = setInterval(async () => {
    if (document.hidden || isAsking) return;
    isAsking = true;
    await poll();
    isAsking = false;
  }, POLL_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
}

function card(status, history) {
  const past = history.get(status.model) ?? { held: [], wait: [] };
  history.set(status.model, past);
  remember(past.held, status.your_items_in_flight);
  remember(past.wait, status.expected_wait_s);
  return h(
    "div",
    { class: "card" },
    h(
      "div",
      { class: "row between" },
      h("h2", { class: "long" }, status.model),
      badge(status.is_busy ? "busy" : "idle"),
    ),
    h(
      "dl",
      { class: "facts" },
      h("dt", {}, "Throughput of the workers"),
      h("dd", {}, `${status.items_per_s} items/s`),
      h("dt", {}, "Your items in flight"),
      h("dd", {}, status.your_items_in_flight),
    ),
    sparkline("Your items in flight", past.held, 4, KEPT),
    h(
      "dl",
      { class: "facts" },
      h("dt", {}, "Expected wait"),
      h("dd", {}, status.expected_wait_s ? duration(status.expected_wait_s * 1000) : "none"),
    ),
    sparkline("Expected wait in seconds", past.wait, 1, KEPT),
  );
}

function remember(values, value) {
  values.push(value);
  if (values.length > KEPT) values.shift();
}
