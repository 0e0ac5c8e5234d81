// The view "Try": a chat for text models, and a form with its results for the others. `#try/MODEL` chooses one, and
// `#try/MODEL?again=ID` shows the input of a prediction, to be changed and sent again.

import { call } from "./api.js";
import { chatOf, fitsChat } from "./chat.js";
import { failure, h, put, say } from "./dom.js";
import { searchable } from "./filters.js";
import { ENDS, follow } from "./follow.js";
import { formOf } from "./form.js";
import { historyList, inputOfTry, remember } from "./history.js";
import { about, inputSchemaOf } from "./models.js";
import { resultOf } from "./results.js";
import { copyLink } from "./share.js";
import { snippets } from "./snippets.js";

const MOST_EARLIER = 12;

/** The model that was tried last, to which the view returns. */
let lastModel = "";

/** Shows the view. */
export async function show(place, [named], signal, params) {
  const models = (await call("v1/models", { signal })).data;
  put(place, h("h1", {}, "Try a model"));
  if (!models.length) {
    place.append(h("p", { class: "note" }, "This key may use no model."));
    return;
  }
  // A chat explains itself, so it comes first.
  const wanted = named || lastModel;
  const model = models.find(({ id }) => id === wanted) ?? models.find(({ task }) => task === "text") ?? models[0];
  lastModel = model.id;
  const [schema, again] = await Promise.all([inputSchemaOf(model.id, signal), inputOf(params.get("again"), signal)]);
  place.append(
    h("div", { class: "card picker" }, h("div", { class: "field" }, h("label", { for: "model" }, "Model"), searchable(selectOf(models, model), "Model")), about(model, schema)),
    ...(again.error ? [failure(again.error)] : []),
    model.task === "text" && fitsChat(again.input) ? chatOf(model, schema, signal, again.input) : formWithResults(model, schema, signal, again.input),
    historyList(signal),
  );
}

/** The input of an earlier try: from this browser, or from the API while it keeps the prediction. */
async function inputOf(id, signal) {
  if (!id) return { input: null };
  const kept = inputOfTry(id);
  if (kept) return { input: kept };
  try {
    return { input: (await call(`v1/predictions/${encodeURIComponent(id)}`, { signal })).input };
  } catch (error) {
    return { input: null, error };
  }
}

function selectOf(models, chosen) {
  const select = h(
    "select",
    {
      id: "model",
      on: {
        change: () => {
          location.hash = `try/${encodeURIComponent(select.value)}`;
        },
      },
    },
    models.map((model) => h("option", { value: model.id, selected: model === chosen }, model.id)),
  );
  return select;
}

function formWithResults(model, schema, signal, input) {
  const { element, read, source, fill, edit } = formOf(schema);
  if (input) fill(input);
  const outcome = h("div", { class: "outcome" }, h("p", { class: "note" }, `The result appears here. ${isFilled(element) ? "The form has an example: press Run." : "Fill in the form, then press Run."}`));
  const earlier = h("div", { class: "stack" });
  const run = h("button", { class: "main" }, "Run");
  const submit = async (event) => {
    event.preventDefault();
    if (run.disabled) return;
    run.disabled = true;
    try {
      keep(outcome, earlier);
      const before = source() && sourceOf(source(), signal);
      await predict({ version: model.id, input: await read() }, before, outcome, edit, signal);
    } catch (error) {
      if (!signal.aborted) put(outcome, failure(error));
    } finally {
      run.disabled = false;
    }
  };
  return h(
    "div",
    { class: "columns" },
    h("form", { class: "card", on: { submit } }, element, run),
    h("div", { class: "stack beside" }, outcome, earlier),
  );
}

/** True if no required field is empty. */
const isFilled = (form) => [...form.querySelectorAll("[required]")].every((control) => control.value);

/** Moves the last result below the next one, so that they can be compared. */
function keep(outcome, earlier) {
  const last = outcome.querySelector(".result");
  if (!last) return;
  if (!earlier.children.length) earlier.append(h("h2", {}, "Earlier"));
  earlier.firstChild.after(h("div", { class: "card" }, last));
  while (earlier.children.length > MOST_EARLIER + 1) earlier.lastChild.remove();
}

/** A chosen file as a source for results, until the view is left. */
function sourceOf(file, signal) {
  const url = URL.createObjectURL(file);
  signal.addEventListener("abort", () => URL.revokeObjectURL(url));
  return { url, type: file.type };
}

async function predict(body, before, outcome, edit, signal) {
  say("Sent.");
  put(outcome, h("div", { class: "card" }, h("p", { class: "muted" }, "Sent …")));
  // On a phone, the result is below a long form.
  outcome.scrollIntoView({ block: "nearest" });
  const created = await call("v1/predictions", { method: "POST", body, signal });
  remember(created, body.version);
  const path = `v1/predictions/${encodeURIComponent(created.id)}`;
  const prediction = ENDS.includes(created.status) ? created : await follow(path, outcome, signal);
  const link = h("a", { href: `#predictions/${encodeURIComponent(created.id)}` }, "Open the prediction");
  put(outcome, h("div", { class: "card" }, h("h2", {}, "Result"), resultOf(prediction, signal, before, edit), h("div", { class: "row" }, link, copyLink(created.id))), snippets(body));
  say(`The prediction ${prediction.status}.`);
}
