// A heat map of a report: a cell for each hour of the week.

import { h, svg } from "./dom.js";
import { measured, placeText } from "./wording.js";

const WIDTH = 960;
const ROW = 24;
const LEFT = 40;

/** A row of cells per series. */
export function heat(title, series, unit) {
  const places = series[0].x;
  const most = Math.max(...series.flatMap((one) => one.y.map((value) => value ?? 0)), 1e-12);
  const wide = (WIDTH - LEFT) / places.length;
  const height = series.length * ROW;
  const cell = (one, value, at, row) =>
    svg(
      "rect",
      { x: LEFT + at * wide, y: row * ROW, width: wide - 1, height: ROW - 1, rx: 2, class: "c0", "fill-opacity": (0.06 + 0.94 * ((value ?? 0) / most)).toFixed(3) },
      svg("title", {}, `${one.name} ${placeText(places[at])}: ${measured(value, unit)}`),
    );
  const every = Math.ceil(places.length / 12);
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": `${title}, cells` },
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${height + 20}`, class: "drawing heat-plot", role: "img", "aria-label": title },
      series.map((one, row) => [
        svg("text", { x: LEFT - 6, y: row * ROW + 16, "text-anchor": "end" }, one.name),
        one.y.map((value, at) => cell(one, value, at, row)),
      ]),
      places.map((place, at) =>
        at % every ? null : svg("text", { x: LEFT + (at + 0.5) * wide, y: height + 15, "text-anchor": "middle" }, placeText(place)),
      ),
    ),
    h("p", { class: "muted" }, `Darkest: ${measured(most, unit)}`),
  );
}
