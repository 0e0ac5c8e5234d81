// Colors of series. Those beyond the eighth are told apart by dashes.

import { svg } from "./dom.js";

const COLORS = 8;
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];

/** The class of a series' color. */
export const colorOf = (index) => `c${index % COLORS}`;

/** The dashes of a series' line. Null: none. */
export const dashOf = (index) => DASHES[Math.floor(index / COLORS) % DASHES.length] || null;

/** A sample of a series, for legends. */
export function mark(index, kind) {
  const shape =
    kind === "lines"
      ? svg("line", { x1: 0, x2: 16, y1: 5, y2: 5, "stroke-dasharray": dashOf(index) })
      : svg("rect", { x: 3, width: 10, height: 10, rx: 2 });
  const given = { viewBox: "0 0 16 10", class: `mark ${colorOf(index)}`, "aria-hidden": "true" };
  return svg("svg", given, shape);
}
