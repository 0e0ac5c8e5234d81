// A heat map of the cosine similarities of several vectors. It is a table, so it can be read out.

import { h } from "./dom.js";

const MOST = 24;
const COLD = [238, 242, 247];
const HOT = [23, 60, 143];
const TURN = 0.179; // Relative luminance at which black and white have the same contrast.

/** The cosine of the angle between two vectors. */
export function cosine(one, other) {
  let dot = 0;
  let left = 0;
  let right = 0;
  for (let index = 0; index < one.length; index += 1) {
    dot += one[index] * other[index];
    left += one[index] ** 2;
    right += other[index] ** 2;
  }
  return left && right ? dot / Math.sqrt(left * right) : 0;
}

/** The map of these texts, of which `vectors` has a vector each. */
export function heatMap(texts, vectors) {
  const count = Math.min(vectors.length, MOST);
  const numbers = [...Array(count).keys()];
  const head = h(
    "tr",
    {},
    h("td"),
    numbers.map((number) =>
      h("th", { scope: "col", title: texts[number], "aria-label": texts[number] }, number + 1),
    ),
  );
  const rows = numbers.map((row) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, `${row + 1}`),
      numbers.map((column) => cell(cosine(vectors[row], vectors[column]))),
    ),
  );
  return h(
    "div",
    { class: "heat" },
    closest(texts, vectors.slice(0, count)),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Cosine similarities" },
      h(
        "table",
        {},
        h("caption", {}, "Cosine similarity"),
        h("thead", {}, head),
        h("tbody", {}, rows),
      ),
    ),
    h(
      "ol",
      { class: "texts" },
      numbers.map((number) => h("li", {}, texts[number])),
    ),
    vectors.length > MOST &&
      h("p", { class: "muted" }, `The first ${MOST} of ${vectors.length} texts.`),
  );
}

/** The two texts whose meaning is closest, in words. */
function closest(texts, vectors) {
  let best = { value: -2 };
  vectors.forEach((vector, at) => {
    for (let other = at + 1; other < vectors.length; other += 1) {
      const value = cosine(vector, vectors[other]);
      if (value > best.value) best = { value, at, other };
    }
  });
  if (best.value < -1) return null;
  return h("p", {}, "Closest in meaning: ", h("b", {}, texts[best.at]), " and ", h("b", {}, texts[best.other]), ` (${best.value.toFixed(2)} of 1).`);
}

function cell(value) {
  const made = h("td", {}, value.toFixed(2));
  const share = Math.min(1, Math.max(0, value));
  const color = COLD.map((from, index) => Math.round(from + (HOT[index] - from) * share));
  made.style.backgroundColor = `rgb(${color.join(" ")})`;
  made.style.color = luminance(color) > TURN ? "black" : "white";
  return made;
}

/** https://www.w3.org/TR/WCAG22/#dfn-relative-luminance */
function luminance(color) {
  const [red, green, blue] = color.map((byte) => {
    const share = byte / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
