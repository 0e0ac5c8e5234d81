// The last tries. They end with the tab or when the reader logs out, unless the reader keeps them in this browser.

import { keyId } from "./api.js";
import { h, keepFocus, put } from "./dom.js";
import { moment } from "./timing.js";

const KEPT = "penstock.tries";
const KEPT_IN_BROWSER = "penstock.tries.kept";
const MOST = 20;
const MOST_IN_BROWSER = 100;
/** A longer input is not kept, only its summary. */
const MOST_CHARACTERS = 20_000;
const LONGEST_SUMMARY = 80;
/** Files in an input, which are long and say nothing in a list. */
const FILE = /data:[\w.+-]+\/[\w.+-]+;base64,[\w+/=]*/g;

/** Address at which the input of a prediction can be changed and sent again. */
export const againLink = (model, id) => `#try/${encodeURIComponent(model)}?again=${encodeURIComponent(id)}`;

/** The input of a prediction in a few words. */
export function summary(input) {
  const found = input.prompt ?? input.text ?? input.query ?? input.texts ?? input.messages?.at(-1)?.content ?? input.input ?? input;
  const whole = typeof found === "string" ? found : JSON.stringify(found);
  const text = whole.replace(FILE, "a file");
  return text.length > LONGEST_SUMMARY ? `${text.slice(0, LONGEST_SUMMARY)}…` : text;
}

/** Each key decides for itself. */
const nameOfChoice = () => `${KEPT_IN_BROWSER}.${keyId()}`;
const isKept = () => localStorage.getItem(nameOfChoice()) !== null;

/** Tries of other keys in this browser are none of the reader's business. */
const addressOfTries = () => (isKept() ? [localStorage, `${KEPT}.${keyId()}`] : [sessionStorage, KEPT]);

function tries() {
  try {
    const [storage, name] = addressOfTries();
    const found = JSON.parse(storage.getItem(name) ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}

function write(kept) {
  try {
    const [storage, name] = addressOfTries();
    storage.setItem(name, JSON.stringify(kept.slice(0, isKept() ? MOST_IN_BROWSER : MOST)));
  } catch {
    // The storage is full or turned off: there is no history.
  }
}

/**
 * Keeps a prediction that was just created, and forgets the oldest one.
 * @param {object} created the API's response, whose input does not show secrets.
 * @param {string} model its name.
 */
export function remember({ id, input }, model) {
  const text = JSON.stringify(input);
  const isShort = text.length <= MOST_CHARACTERS && !text.includes(";base64,");
  write([{ id, model, words: summary(input), input: isShort ? input : null, at: Date.now() / 1000 }, ...tries()]);
  document.dispatchEvent(new Event("penstock:try"));
}

/** The input of a try. Null: it was too long to be kept, or it has a file. */
export const inputOfTry = (id) => tries().find((one) => one.id === id)?.input ?? null;

/** Forgets the tries of this tab. */
export function forget() {
  sessionStorage.removeItem(KEPT);
}

function clear() {
  const [storage, name] = addressOfTries();
  storage.removeItem(name);
}

/** Moves the tries to the browser's storage, or back to that of the tab. */
function keep(isWanted) {
  const kept = tries();
  clear();
  if (isWanted) localStorage.setItem(nameOfChoice(), "");
  else localStorage.removeItem(nameOfChoice());
  write(kept);
}

/** The tries, which update themselves. */
export function historyList(signal) {
  const place = h("details", { class: "card" });
  const box = h("input", { type: "checkbox", on: { change: () => { keep(box.checked); draw(); } } });
  const draw = () => {
    const kept = tries();
    box.checked = isKept();
    place.hidden = !kept.length;
    put(
      place,
      h("summary", {}, `Your tries in this ${isKept() ? "browser" : "tab"} (${kept.length})`),
      h("p", { class: "hint" }, `The last ${isKept() ? MOST_IN_BROWSER : MOST}. A result is kept for an hour unless the plan sets another time.`),
      h(
        "ul",
        { class: "tries" },
        kept.map(({ id, model, words, at }) =>
          h(
            "li",
            {},
            h("a", { href: `#predictions/${encodeURIComponent(id)}` }, words || id),
            h("span", { class: "hint" }, ` ${model} · ${moment(at)} · `),
            h("a", { href: againLink(model, id), "aria-label": `Try again: ${words || id}` }, "Try again"),
          ),
        ),
      ),
      h(
        "div",
        { class: "row" },
        h("button", { type: "button", class: "quiet", on: { click: () => { clear(); draw(); keepFocus(); } } }, "Clear"),
        h("label", { class: "check" }, box, "Keep my tries in this browser, without files, also after I log out"),
      ),
    );
  };
  document.addEventListener("penstock:try", draw, { signal });
  draw();
  return place;
}
