// Shows a prediction while it waits and runs.

import { call, events } from "./api.js";
import { button, h, put } from "./dom.js";
import { placeInLine } from "./timing.js";

const BAR = /^\s*\d+%\|/;
const MOST_CHARACTERS = 32 * 1024;
const PREVIEW = /^data:image\/(png|jpeg|webp);base64,[A-Za-z0-9+/=]+$/;

/** Shows the progress of a prediction in `outcome`, until it ends. */
export async function follow(path, outcome, signal) {
  const words = h("p", { class: "progress" }, "Waits for a worker …");
  const preview = h("img", { class: "image", alt: "Preview", hidden: true });
  const cancel = button("Cancel", () => call(`${path}/cancel`, { method: "POST", signal }));
  const output = h("pre", { class: "code", "aria-label": "Output", hidden: true });
  const logs = h("pre", { class: "code logs", "aria-label": "Logs", hidden: true });
  put(outcome, h("div", { class: "card" }, words, preview, output, logs, cancel));
  for await (const { event, data } of events(`${path}/stream?events=preview,queue`, signal)) {
    if (event === "logs" && BAR.test(data)) words.textContent = data;
    else if (event === "logs") add(logs, data);
    if (event === "output") add(output, data.startsWith("data:") ? "A file.\n" : data);
    if (event === "output" || (event === "logs" && !BAR.test(data))) words.textContent = "Runs …";
    if (event === "queue") words.textContent = placeInLine(JSON.parse(data));
    if (event === "preview") showPreview(preview, words, data);
  }
}

/** Adds to a text, of which the end is kept. */
function add(element, text) {
  element.textContent = (element.textContent + text).slice(-MOST_CHARACTERS);
  element.hidden = false;
}

function showPreview(preview, words, data) {
  const { image, step, steps } = JSON.parse(data);
  if (!PREVIEW.test(image)) return;
  preview.src = image;
  preview.hidden = false;
  words.textContent = `Step ${Number(step)} of ${Number(steps)}`;
}
