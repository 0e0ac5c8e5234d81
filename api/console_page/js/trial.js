// The view "Try": a form for the chosen model, and the prediction that it starts.

import { call } from "./api.js";
import { failure, h, put, say } from "./dom.js";
import { follow } from "./follow.js";
import { formOf } from "./form.js";
import { resultOf } from "./results.js";
import { snippets } from "./snippets.js";

const ENDS = ["succeeded", "failed", "canceled"];

/** Shows the view. `#try/MODEL` chooses a model. */
export async function show(place, [wanted], signal) {
  const models = (await call("v1/models", { signal })).data;
  put(place, h("h1", {}, "Try a model"));
  if (!models.length) {
    place.append(h("p", { class: "note" }, "This key may use no model."));
    return;
  }
  const chosen = models.find((model) => model.id === wanted) ?? models[0];
  const choice = h(
    "select",
    {
      id: "model",
      on: {
        change: () => {
          location.hash = `try/${encodeURIComponent(choice.value)}`;
        },
      },
    },
    models.map((model) => h("option", { value: model.id, selected: model === chosen }, model.id)),
  );
  const name = encodeURIComponent(chosen.id);
  const [version] = (await call(`v1/models/penstock/${name}/versions`, { signal })).results;
  const { element, read } = formOf(version.openapi_schema.components.schemas.Input);
  const outcome = h("div", { class: "outcome" });
  const run = h("button", { class: "main" }, "Run");
  const submit = async (event) => {
    event.preventDefault();
    if (run.disabled) return;
    run.disabled = true;
    try {
      await predict({ version: chosen.id, input: await read() }, outcome, signal);
    } catch (error) {
      if (!signal.aborted) put(outcome, failure(error));
    } finally {
      run.disabled = false;
    }
  };
  place.append(
    h(
      "div",
      { class: "columns" },
      h(
        "form",
        { class: "card", on: { submit } },
        h("div", { class: "field" }, h("label", { for: "model" }, "Model"), choice),
        element,
        run,
      ),
      h("div", { class: "stack" }, outcome),
    ),
  );
}

async function predict(body, outcome, signal) {
  say("Sent.");
  put(outcome, h("div", { class: "card" }, h("p", { class: "muted" }, "Sent …")));
  const created = await call("v1/predictions", { method: "POST", body, signal });
  const path = `v1/predictions/${encodeURIComponent(created.id)}`;
  let prediction = created;
  if (!ENDS.includes(created.status)) {
    await follow(path, outcome, signal);
    prediction = await call(path, { signal });
  }
  put(
    outcome,
    h(
      "div",
      { class: "card" },
      h("h2", {}, "Result"),
      resultOf(prediction, signal),
      h(
        "p",
        {},
        h("a", { href: `#predictions/${encodeURIComponent(created.id)}` }, "Open the prediction"),
      ),
    ),
    snippets(body),
  );
  say(`The prediction ${prediction.status}.`);
}
