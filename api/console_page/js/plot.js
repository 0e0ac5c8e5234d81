// Small plots in SVG.

import { h, svg } from "./dom.js";

const WIDTH = 320;
const HEIGHT = 90;

/**
 * Bars over time, with a table of the same numbers.
 * @param {string} title what is plotted.
 * @param {{label: string, value: number}[]} bars in order.
 * @param {function(number): string} worded a value for people.
 */
export function bars(title, points, worded) {
  const most = Math.max(...points.map((point) => point.value), 0);
  const sum = points.reduce((total, point) => total + point.value, 0);
  const step = WIDTH / points.length;
  const drawn = points.map(({ label, value }, index) => {
    const height = most ? Math.max(value ? 2 : 0, (value / most) * HEIGHT) : 0;
    return svg(
      "rect",
      { x: index * step + 1, y: HEIGHT - height, width: Math.max(1, step - 2), height, rx: 1.5 },
      svg("title", {}, `${label}: ${worded(value)}`),
    );
  });
  const plot = svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT + 2}`,
      class: "plot",
      role: "img",
      "aria-label": `${title}: ${worded(sum)} in all`,
    },
    svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT + 1, y2: HEIGHT + 1 }),
    drawn,
  );
  const used = points.filter((point) => point.value);
  return h(
    "figure",
    { class: "card" },
    h("figcaption", { class: "row between" }, h("h2", {}, title), h("b", {}, worded(sum))),
    plot,
    h(
      "p",
      { class: "row between muted" },
      h("span", {}, points[0]?.label),
      h("span", {}, points.at(-1)?.label),
    ),
    used.length > 0 &&
      h(
        "details",
        {},
        h("summary", {}, "As numbers"),
        h(
          "dl",
          { class: "facts" },
          used.map((point) => [h("dt", {}, point.label), h("dd", {}, worded(point.value))]),
        ),
      ),
  );
}

/** A line of the last values, oldest first. */
export function sparkline(title, values, most, count) {
  const top = Math.max(most, ...values, 1e-9);
  const points = values.map((value, index) => {
    const x = ((index + count - values.length) / (count - 1)) * WIDTH;
    return `${x.toFixed(1)},${(HEIGHT / 2 - (value / top) * (HEIGHT / 2 - 3)).toFixed(1)}`;
  });
  return svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT / 2 + 2}`,
      class: "plot",
      role: "img",
      "aria-label": `${title}: ${values.at(-1) ?? "nothing"} now`,
    },
    svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT / 2 + 1, y2: HEIGHT / 2 + 1 }),
    svg("polyline", { points: points.join(" ") }),
  );
}
