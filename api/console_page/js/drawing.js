// Plots of reports in SVG: bars, lines and heat maps. The table next to a plot has its numbers.

import { h, svg } from "./dom.js";
import { dollars } from "./money.js";

const WIDTH = 480;
const HEIGHT = 200;
const LEFT = 64;
const TICK_CHARS = 9;
const BOTTOM = 22;
const COLORS = 8;
const short = new Intl.NumberFormat(undefined, { notation: "compact", maximumSignificantDigits: 3 });

const number = new Intl.NumberFormat(undefined, { maximumFractionDigits: 6 });
const MONEY = "US dollars";

/** Draws one plot of a report: `kind`, `title`, `unit`, `stacked`, `series`. */
export function drawing({ kind, title, unit, stacked, series }) {
  const worded = (value) => (value === null ? "-" : (unit === MONEY ? dollars : number.format)(value));
  const drawn = kind === "heat" ? heat(series, worded) : axes(kind, series, stacked, worded);
  return h(
    "figure",
    { class: "card" },
    h("figcaption", {}, h("h2", {}, unit ? `${title} (${unit})` : title)),
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT + BOTTOM}`, class: "drawing", role: "img", "aria-label": title },
      drawn,
    ),
    kind !== "heat" && series.length > 1 && legend(series),
  );
}

function legend(series) {
  const entry = ({ name }, index) =>
    h("li", {}, svg("svg", { viewBox: "0 0 8 8", class: `mark c${index % COLORS}` }, svg("rect", { width: 8, height: 8 })), name);
  return h("ul", { class: "legend" }, series.map(entry));
}

function axes(kind, series, stacked, worded) {
  const places = series[0].x;
  const sums = places.map((_, at) => series.reduce((sum, one) => sum + Math.max(0, one.y[at] ?? 0), 0));
  const values = series.flatMap((one) => one.y.filter((value) => value !== null));
  const most = Math.max(...(stacked && kind === "bars" ? sums : values), 0);
  // Shares near 100 % would all be one line if they began at 0.
  const all = kind === "lines" ? Math.min(...values) : 0;
  const least = kind === "lines" && all > 0.5 * most ? all - (most - all || most) * 0.1 : Math.min(0, all);
  const span = most - least || 1;
  const y = (value) => HEIGHT - ((value - least) / span) * (HEIGHT - 8);
  const step = (WIDTH - LEFT) / places.length;
  const draw = kind === "bars" ? (stacked ? stack : groups) : curves;
  return [ticks(least, most, y), labels(places, step), draw(series, places, step, y, worded)];
}

function ticks(least, most, y) {
  return [least, (least + most) / 2, most].map((value) => [
    svg("line", { x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value), class: "grid" }),
    tick(y(value) + 4, short.format(value)),
  ]);
}

/** A number left of the axis. A long one, such as a small amount of money, is made narrower. */
function tick(y, text) {
  const narrow = text.length > TICK_CHARS && { textLength: LEFT - 6, lengthAdjust: "spacingAndGlyphs" };
  return svg("text", { x: LEFT - 4, y, "text-anchor": "end", ...narrow }, text);
}

function labels(places, step) {
  const every = Math.ceil(places.length / 5);
  return places.map((place, at) => {
    if (at % every) return null;
    const text = place.replace("T", " ").slice(0, 16);
    return svg(
      "text",
      { x: LEFT + (at + 0.5) * step, y: HEIGHT + 16, "text-anchor": at ? "middle" : "start" },
      text.length > 10 && !/^\d{4}-/.test(text) ? `${text.slice(0, 9)}…` : text.slice(0, 10),
    );
  });
}

function bar(x, top, width, bottom, color, told) {
  const height = Math.max(0, bottom - top);
  return svg("rect", { x, y: top, width, height, class: `c${color % COLORS}` }, svg("title", {}, told));
}

function stack(series, places, step, y, worded) {
  return places.map((place, at) => {
    let below = 0;
    return series.map((one, index) => {
      const value = one.y[at] ?? 0;
      if (value <= 0) return null;
      const told = `${one.name}, ${place}: ${worded(value)}`;
      const made = bar(LEFT + at * step + step * 0.1, y(below + value), step * 0.8, y(below), index, told);
      below += value;
      return made;
    });
  });
}

function groups(series, places, step, y, worded) {
  const width = (step * 0.8) / series.length;
  return places.map((place, at) =>
    series.map((one, index) => {
      const value = one.y[at];
      if (value === null) return null;
      const x = LEFT + at * step + step * 0.1 + index * width;
      const ends = [y(value), y(0)].sort((a, b) => a - b);
      return bar(x, ends[0], width, ends[1], index, `${one.name}, ${place}: ${worded(value)}`);
    }),
  );
}

function curves(series, places, step, y) {
  return series.map((one, index) => {
    // A value that is not there ends a line, and the next one begins another.
    const parts = [[]];
    one.y.forEach((value, at) => {
      if (value === null) parts.push([]);
      else parts.at(-1).push(`${(LEFT + (at + 0.5) * step).toFixed(1)},${y(value).toFixed(1)}`);
    });
    return parts
      .filter((points) => points.length)
      .map((points) =>
        svg(
          "polyline",
          { points: (points.length > 1 ? points : [points[0], points[0]]).join(" "), class: `c${index % COLORS}` },
          svg("title", {}, one.name),
        ),
      );
  });
}

function heat(series, worded) {
  const places = series[0].x;
  const most = Math.max(...series.flatMap((one) => one.y.map((value) => value ?? 0)), 1e-12);
  const width = (WIDTH - LEFT) / places.length;
  const height = HEIGHT / series.length;
  return [
    series.map((one, row) => [
      svg("text", { x: LEFT - 4, y: (row + 0.6) * height, "text-anchor": "end" }, one.name),
      one.y.map((value, at) =>
        svg(
          "rect",
          {
            x: LEFT + at * width,
            y: row * height,
            width: width - 1,
            height: height - 1,
            class: "c0",
            "fill-opacity": (0.06 + 0.94 * ((value ?? 0) / most)).toFixed(3),
          },
          svg("title", {}, `${one.name}, ${places[at]}: ${worded(value)}`),
        ),
      ),
    ]),
    labels(places, width),
  ];
}
