// The last tries of this tab: in sessionStorage, so they end with the tab or when the reader logs out.

import { h, keepFocus, put } from "./dom.js";
import { moment } from "./timing.js";

const KEPT = "penstock.tries";
const MOST = 20;
const LONGEST_SUMMARY = 80;
/** Files in an input, which are long and say nothing in a list. */
const FILE = /data:[\w.+-]+\/[\w.+-]+;base64,[\w+/=]*/g;

/** The input of a prediction in a few words. */
export function summary(input) {
  const found = input.prompt ?? input.text ?? input.query ?? input.texts ?? input.messages?.at(-1)?.content ?? input.input ?? input;
  const whole = typeof found === "string" ? found : JSON.stringify(found);
  const text = whole.replace(FILE, "a file");
  return text.length > LONGEST_SUMMARY ? `${text.slice(0, LONGEST_SUMMARY)}…` : text;
}

function tries() {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEPT) ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}

/**
 * Keeps a prediction that was just created, and forgets the oldest one.
 * @param {object} created the API's response, whose input does not show secrets.
 * @param {string} model its name.
 */
export function remember({ id, input }, model) {
  const kept = [{ id, model, words: summary(input), at: Date.now() / 1000 }, ...tries()].slice(0, MOST);
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(kept));
  } catch {
    // The storage is full or turned off: there is no history.
  }
  document.dispatchEvent(new Event("penstock:try"));
}

/** Forgets all tries. */
export function forget() {
  sessionStorage.removeItem(KEPT);
}

/** The tries, which update themselves. */
export function historyList(signal) {
  const place = h("details", { class: "card" });
  const draw = () => {
    const kept = tries();
    place.hidden = !kept.length;
    put(
      place,
      h("summary", {}, `Your tries in this tab (${kept.length})`),
      h("p", { class: "hint" }, `The last ${MOST}. A prediction is kept for an hour unless the plan sets another time.`),
      h(
        "ul",
        { class: "tries" },
        kept.map(({ id, model, words, at }) =>
          h("li", {}, h("a", { href: `#predictions/${encodeURIComponent(id)}` }, words || id), h("span", { class: "hint" }, ` ${model} · ${moment(at)}`)),
        ),
      ),
      h("button", { type: "button", class: "quiet", on: { click: () => { forget(); draw(); keepFocus(); } } }, "Clear"),
    );
  };
  document.addEventListener("penstock:try", draw, { signal });
  draw();
  return place;
}
