// The "Live" view: the load of the models, polled every two seconds while the page is visible.

import { call } from "./api.js";
import { badge, failure, h, put } from "./dom.js";
import { MOST_WITHOUT_SEARCH } from "./filters.js";
import { sparkline } from "./sparkline.js";
import { duration } from "./timing.js";

/** How often the page asks. */
export const POLL_MS = 2000;
const KEPT = 60;

/** Shows the view. */
export async function show(place, _, signal) {
  const cards = h("div", { class: "plots" });
  const search = h("input", { type: "search", "aria-label": "Search: Model", placeholder: "Search", autocomplete: "off", spellcheck: "false" });
  const finding = h("div", { class: "labeled", hidden: true }, search);
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
    finding,
    cards,
  );
  const history = new Map();
  const find = () => {
    const wanted = search.value.trim().toLowerCase();
    for (const shown of cards.children) shown.hidden = !shown.querySelector("h2").textContent.toLowerCase().includes(wanted);
  };
  search.addEventListener("input", find);
  const poll = async () => {
    try {
      const { data } = await call("v1/status", { signal });
      put(cards, data.map((status) => card(status, history)));
      finding.hidden = data.length <= MOST_WITHOUT_SEARCH;
      find();
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
  if (status.expected_wait_s !== null) remember(past.wait, status.expected_wait_s);
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
      h("dd", {}, pace(status.items_per_s)),
      h("dt", {}, "Your items in flight"),
      h("dd", {}, status.your_items_in_flight),
    ),
    sparkline("Your items in flight", past.held, 4, KEPT),
    h(
      "dl",
      { class: "facts" },
      h("dt", {}, "Expected wait"),
      h("dd", {}, wait(status.expected_wait_s)),
    ),
    sparkline("Expected wait in seconds", past.wait, 1, KEPT),
  );
}

/** A throughput in words. */
export function pace(itemsPerS) {
  if (itemsPerS === null) return "not measured recently";
  return itemsPerS < 0.1 ? `one item in ${duration(1000 / itemsPerS)}` : `${itemsPerS} items/s`;
}

/** An estimated wait in words. */
export function wait(seconds) {
  if (seconds === null) return "not known yet";
  return seconds ? duration(seconds * 1000) : "none";
}

function remember(values, value) {
  values.push(value);
  if (values.length > KEPT) values.shift();
}
