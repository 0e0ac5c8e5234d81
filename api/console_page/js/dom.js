// Builds elements. Text is always a text node: text of models, callers and files is not markup.

/** Longest text, in characters, that a cell of a list never breaks. */
const SHORT = 16;
const SVG = "http://www.w3.org/2000/svg";

/**
 * Makes an element.
 * @param {string} name of the element.
 * @param {object} given attributes. `on` has listeners by event. False and null leave one out.
 * @param {...any} children nodes, texts, numbers, or lists of them. Null and false are left out.
 */
export function h(name, given = {}, ...children) {
  return fill(document.createElement(name), given, children);
}

/** Makes an SVG element, like `h`. */
export function svg(name, given = {}, ...children) {
  return fill(document.createElementNS(SVG, name), given, children);
}

function fill(element, { on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  element.append(nodesOf(children));
  return element;
}

function nodesOf(children) {
  // A call can't take as many arguments as a long list has nodes.
  const nodes = document.createDocumentFragment();
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    nodes.append(child instanceof Node ? child : String(child));
  }
  return nodes;
}

/** Replaces what an element holds. */
export function put(element, ...children) {
  element.replaceChildren(nodesOf(children));
  return element;
}

let isForNextView = false;

/** Says something to everyone, screen readers included. */
export function say(text) {
  isForNextView = false;
  document.getElementById("status").textContent = text;
}

/** Says something that stays when the next view opens. */
export function sayThenOpen(text, address) {
  say(text);
  isForNextView = true;
  if (location.hash === address) window.dispatchEvent(new HashChangeEvent("hashchange"));
  else location.hash = address;
}

/** Removes what was said about the view before. */
export function hush() {
  if (!isForNextView) say("");
  isForNextView = false;
}

/** A note of what went wrong. */
export function failure(error) {
  return h("p", { class: "error", role: "alert" }, error.message || String(error));
}

/** Moves the focus to the view if the element that had it is gone, so that the keyboard continues from there. */
export function keepFocus() {
  if (document.activeElement === document.body) document.getElementById("main").focus({ preventScroll: true });
}

/** A button that can't be pressed again while its work runs. Errors go to `onError`. */
export function button(label, work, { onError = (error) => say(error.message), ...given } = {}) {
  const made = h("button", { type: "button", ...given }, label);
  made.addEventListener("click", async () => {
    const hadFocus = document.activeElement === made;
    made.disabled = true;
    try {
      await work();
    } catch (error) {
      if (error.name !== "AbortError") onError(error);
    } finally {
      made.disabled = false;
      // A disabled button loses the focus.
      if (hadFocus && document.activeElement === document.body) made.focus();
    }
  });
  return made;
}

/**
 * A button that copies a text.
 * @param {string} what is copied, in words.
 * @param {HTMLElement} shown has the text. Pages without TLS have no clipboard: the reader copies what is selected.
 */
export function copyButton(label, what, text, shown) {
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    say(`${what} was copied.`);
  };
  const select = () => {
    getSelection().selectAllChildren(shown);
    say("Selected. Copy it with the keyboard.");
  };
  return button(label, copy, { class: "quiet", onError: select });
}

/** A table that always fits: cells wrap, and if it is narrow, each row becomes a block with the heads in it. */
export function listing(caption, heads, rows) {
  const made = table(caption, heads, rows);
  made.classList.add("listing");
  for (const row of made.querySelectorAll("tbody tr")) {
    [...row.cells].forEach((cell, at) => {
      cell.dataset.head = heads[at];
      if (cell.textContent.length <= SHORT) cell.classList.add("whole");
    });
  }
  return made;
}

/** A table that scrolls if it is too wide. */
export function table(caption, heads, rows) {
  const head = h(
    "tr",
    {},
    heads.map((text) => h("th", { scope: "col" }, text || h("span", { class: "hidden" }, "Actions"))),
  );
  const body = rows.map((cells) =>
    h(
      "tr",
      {},
      cells.map((cell) => h("td", {}, cell)),
    ),
  );
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("thead", {}, head), h("tbody", {}, body)),
  );
}

/** A state with its color. */
export function badge(state) {
  const kinds = {
    succeeded: "good",
    completed: "good",
    valid: "good",
    idle: "good",
    active: "good",
    failed: "bad",
    expired: "bad",
    revoked: "bad",
    frozen: "bad",
    busy: "warm",
  };
  return h("span", { class: `badge ${kinds[state] ?? "plain"}` }, state);
}

/** Offers bytes as a download. */
export function download(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
