// A small line of the last values, in SVG.

import { svg } from "./dom.js";

const WIDTH = 320;
const HEIGHT = 45;

/** A line of the last values, oldest first. */
export function sparkline(title, values, most, count) {
  const top = Math.max(most, ...values, 1e-9);
  const points = values.map((value, index) => {
    const x = ((index + count - values.length) / (count - 1)) * WIDTH;
    return `${x.toFixed(1)},${(HEIGHT - (value / top) * (HEIGHT - 3)).toFixed(1)}`;
  });
  return svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT + 2}`,
      class: "plot",
      role: "img",
      "aria-label": `${title}: ${values.at(-1) ?? "nothing"} now`,
    },
    svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT + 1, y2: HEIGHT + 1 }),
    svg("polyline", { points: points.join(" ") }),
  );
}
