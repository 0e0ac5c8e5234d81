// The view "Predictions": a list, and one prediction.

import { call } from "./api.js";
import { badge, button, h, put, say, table } from "./dom.js";
import { follow } from "./follow.js";
import { resultOf } from "./results.js";
import { snippets } from "./snippets.js";
import { moment, timeBar } from "./timing.js";

const OPEN = ["starting", "processing"];
const LONGEST_SUMMARY = 80;

/** Shows the view. `#predictions/ID` opens one. */
export async function show(place, [id], signal) {
  await (id ? one(place, id, signal) : list(place, signal));
}

async function list(place, signal) {
  const rows = h("div", { class: "stack" });
  const reload = button("Reload", () => show(place, [], signal));
  put(place, h("div", { class: "row between" }, h("h1", {}, "Predictions"), reload), rows);
  let cursor = "";
  const more = button("Show more", () => page());
  async function page() {
    const query = cursor ? `?cursor=${encodeURIComponent(cursor)}` : "";
    const { results, next } = await call(`v1/predictions${query}`, { signal });
    cursor = next ? new URL(next).searchParams.get("cursor") : "";
    if (results.length) {
      rows.append(
        table("Predictions", ["Created", "State", "Input", "Time", "Model"], results.map(row)),
      );
    } else if (!rows.children.length) {
      rows.append(
        h(
          "p",
          { class: "note" },
          "There are no predictions yet. ",
          h("a", { href: "#try" }, "Try a model."),
        ),
      );
    }
    more.hidden = !cursor;
  }
  await page();
  place.append(more);
}

function row(prediction) {
  const link = h("a", { href: linkTo(prediction) }, moment(prediction.created_at));
  const words = h("span", { class: "clip" }, summary(prediction.input));
  return [
    link,
    badge(prediction.status),
    words,
    timeBar(prediction.metrics, { isSmall: true }),
    prediction.model,
  ];
}

const linkTo = ({ id }) => `#predictions/${encodeURIComponent(id)}`;

function summary(input) {
  const found = input.prompt ?? input.text ?? input.query ?? input.texts ?? input.input ?? input;
  const text = typeof found === "string" ? found : JSON.stringify(found);
  return text.length > LONGEST_SUMMARY ? `${text.slice(0, LONGEST_SUMMARY)}…` : text;
}

async function one(place, id, signal) {
  const path = `v1/predictions/${encodeURIComponent(id)}`;
  const prediction = await call(path, { signal });
  const isOpen = OPEN.includes(prediction.status);
  const outcome = h("div", { class: "stack" });
  if (!isOpen) {
    put(outcome, h("div", { class: "card" }, h("h2", {}, "Result"), resultOf(prediction, signal)));
  }
  put(
    place,
    h("p", {}, h("a", { href: "#predictions" }, "All predictions")),
    h(
      "div",
      { class: "row between" },
      h("h1", { class: "long" }, prediction.id),
      badge(prediction.status),
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
        ),
        snippets({ version: prediction.model, input: prediction.input }),
      ),
    ),
  );
  if (!isOpen) return;
  await follow(path, outcome, signal);
  say("The prediction ended.");
  await one(place, id, signal);
}

function facts(prediction) {
  const told = {
    Model: prediction.model,
    Created: moment(prediction.created_at),
    Started: moment(prediction.started_at),
    Completed: moment(prediction.completed_at),
    Deadline: moment(prediction.deadline),
  };
  return h(
    "dl",
    { class: "facts" },
    Object.entries(told).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}
