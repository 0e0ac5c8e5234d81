// Shows a prediction while it waits and runs.

import { call, events, isRefusal, pause, send, StreamLost } from "./api.js";
import { button, h, put } from "./dom.js";
import { placeInLine } from "./timing.js";

const BAR = /^\s*\d+%\|/;
const MOST_CHARACTERS = 32 * 1024;
const FIRST_POLL_MS = 2000;
const LONGEST_POLL_MS = 15_000;
const MOST_FAILURES = 10;
/** How long after its deadline a prediction may end. */
const GRACE_MS = 60_000;
const PREVIEW = /^data:image\/(png|jpeg|webp);base64,[A-Za-z0-9+/=]+$/;

/** States in which a prediction stays. */
export const ENDS = ["succeeded", "failed", "canceled"];

/** Shows the progress of a prediction in `outcome`, until it ends. Returns it with its output. */
export async function follow(path, outcome, signal) {
  const words = h("p", { class: "progress" }, "Waits for a worker …");
  const preview = h("img", { class: "image", alt: "Preview", hidden: true });
  const cancel = button("Cancel", () => call(`${path}/cancel`, { method: "POST", signal }));
  const output = h("pre", { class: "code", "aria-label": "Output", hidden: true });
  const logs = h("pre", { class: "code logs", "aria-label": "Logs", hidden: true });
  put(outcome, h("div", { class: "card" }, words, preview, output, logs, cancel));
  const show = ({ event, data }) => {
    if (event === "logs" && BAR.test(data)) words.textContent = data;
    else if (event === "logs") add(logs, data);
    if (event === "output") add(output, data.startsWith("data:") ? "A file.\n" : data);
    if (event === "output" || (event === "logs" && !BAR.test(data))) words.textContent = "Runs …";
    if (event === "queue") words.textContent = placeInLine(JSON.parse(data));
    if (event === "preview") showPreview(preview, words, data);
  };
  return untilEnd(path, "preview,queue", signal, show, ({ status }) => {
    words.textContent = `The connection for live progress was lost. Asking for the result from time to time: ${status}.`;
  });
}

/**
 * Reads the events of a prediction until it ends. If the stream is lost, asks for the prediction instead.
 * @param {string} kinds of additional events.
 * @param {function} onEvent gets each event.
 * @param {function} onPoll gets the prediction each time it has not ended yet.
 * @returns {Promise<object>} the prediction with its output.
 */
export async function untilEnd(path, kinds, signal, onEvent, onPoll) {
  try {
    for await (const event of events(`${path}/stream?events=${kinds}`, signal)) onEvent(event);
  } catch (error) {
    if (!(error instanceof StreamLost)) throw error;
  }
  return poll(path, signal, onPoll);
}

/** Asks for a prediction until it ends, but only until its deadline and a limited number of failures in a row. */
async function poll(path, signal, onPoll) {
  let failures = 0;
  for (let waitMs = FIRST_POLL_MS; ; waitMs = Math.min(waitMs * 1.5, LONGEST_POLL_MS)) {
    let prediction = null;
    let nowMs = 0;
    try {
      const response = await send(path, { signal });
      // The reader's clock may differ from that of the API, which set the deadline.
      nowMs = Date.parse(response.headers.get("date")) || Date.now();
      prediction = await response.json();
      failures = 0;
    } catch (error) {
      failures += 1;
      if (signal.aborted || isRefusal(error) || failures === MOST_FAILURES) throw error;
    }
    if (prediction && ENDS.includes(prediction.status)) return prediction;
    if (prediction && nowMs > Date.parse(prediction.deadline) + GRACE_MS) throw new Error("the prediction did not end by its deadline");
    if (prediction) onPoll(prediction);
    await pause(waitMs, signal);
    signal.throwIfAborted();
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
