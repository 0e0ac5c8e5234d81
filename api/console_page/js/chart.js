// Charts of bars and lines over time, in SVG. They are drawn at the width of their place, so that text keeps its size.

import { h, put, svg } from "./dom.js";
import { heat } from "./heat_plot.js";
import { ranking } from "./ranking.js";
import { colorOf, dashOf, mark } from "./series.js";
import { isTime, measured, placeText, tick } from "./wording.js";

const HEIGHT = 200;
const TOP = 8;
const BOTTOM = 24;
const CHAR = 6.4;
const LABEL = 64;
const FIRST_WIDTH = 640;
const MOST_DOTS = 45;

/**
 * Draws one plot: `kind`, `title`, `unit`, `stacked`, `series` with `name`, `x` and `y`.
 * @param {string} sum a total for the heading, if the values may be added.
 */
export function chart({ kind, title, unit, stacked, series }, sum = "") {
  const isOverTime = isTime(series[0]?.x ?? []);
  const shown =
    kind === "heat"
      ? heat(title, series, unit)
      : kind === "bars" && !isOverTime
        ? ranking(title, series, stacked, unit)
        : overTime(kind, title, series, stacked, unit);
  const units = unit && unit !== "US dollars" ? h("span", { class: "muted" }, ` (${unit})`) : null;
  return h(
    "figure",
    { class: "card chart" },
    h("figcaption", {}, h("h2", {}, title, units), sum && h("b", {}, sum)),
    shown,
    kind !== "heat" && series.length > 1 && legend(series, kind),
  );
}

function legend(series, kind) {
  const entry = ({ name }, index) => h("li", {}, mark(index, kind), h("span", { class: "long" }, name));
  return h("ul", { class: "legend" }, series.map(entry));
}

function overTime(kind, title, series, stacked, unit) {
  const tip = h("p", { class: "tip", hidden: true });
  const place = h("div", { class: "plot-place" });
  let drawn = 0;
  const draw = (width) => {
    if (width === drawn || width < 1) return;
    drawn = width;
    put(place, plotOf({ kind, title, series, stacked, unit, width, tip }), tip);
  };
  draw(FIRST_WIDTH);
  new ResizeObserver(([{ contentRect }]) => draw(Math.floor(contentRect.width))).observe(place);
  return place;
}

function plotOf(given) {
  const { kind, title, series, stacked, unit, width, tip } = given;
  const places = series[0].x;
  const { least, most, step } = scaleOf(kind, series, stacked && kind === "bars");
  const values = [];
  for (let at = 0; at <= Math.round((most - least) / step); at += 1) values.push(least + at * step);
  const words = values.map((value) => tick(value, step, unit));
  const left = Math.ceil(Math.max(...words.map((word) => word.length)) * CHAR) + 8;
  const y = (value) => TOP + (1 - (value - least) / (most - least)) * HEIGHT;
  const wide = (width - left) / places.length;
  const x = (at) => left + (at + 0.5) * wide;
  const draw = kind === "bars" ? (stacked ? stack : groups) : curves;
  const plot = svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${TOP + HEIGHT + BOTTOM}`,
      width,
      height: TOP + HEIGHT + BOTTOM,
      class: "drawing",
      role: "img",
      "aria-label": title,
    },
    values.map((value, at) => [
      svg("line", { x1: left, x2: width, y1: y(value), y2: y(value), class: "grid" }),
      svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, words[at]),
    ]),
    labels(places, x, wide, width),
    draw({ series, places, x, y, wide, base: y(Math.max(least, Math.min(0, most))) }),
  );
  pointed(plot, tip, { series, places, unit, left, wide, width });
  return plot;
}

/** The ends of the axis and the distance of its lines: 1, 2, 2.5 or 5 times a power of ten. */
function scaleOf(kind, series, isStacked) {
  const values = series.flatMap((one) => one.y.filter((value) => value !== null));
  const sums = series[0].x.map((_, at) => series.reduce((sum, one) => sum + Math.max(0, one.y[at] ?? 0), 0));
  // A call can't take as many arguments as a long range has values.
  const high = (isStacked ? sums : values).reduce((most, value) => Math.max(most, value), 0);
  const low = values.reduce((least, value) => Math.min(least, value), Infinity);
  // Shares near 100 % would all be one line if they began at 0.
  const start = kind === "lines" && low > 0.5 * high && low < high ? low : Math.min(0, low);
  const rough = (high - start || high || 1) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const isWhole = values.every(Number.isInteger);
  const step = Math.max(isWhole ? 1 : 0, [1, 2, 2.5, 5, 10].find((by) => by * power >= rough * 0.999) * power);
  const least = Math.floor(start / step + 1e-9) * step;
  return { least, most: Math.max(Math.ceil(high / step - 1e-9) * step, least + step), step };
}

function labels(places, x, wide, width) {
  const every = Math.ceil(LABEL / wide);
  return places.map((place, at) => {
    if (at % every) return null;
    const text = placeText(place);
    const half = (text.length * CHAR) / 2;
    const middle = Math.min(Math.max(x(at), half), width - half);
    if (at && x(at) + half > width + wide / 2) return null;
    return svg("text", { x: middle, y: TOP + HEIGHT + 18, "text-anchor": "middle" }, text);
  });
}

const bar = (x, top, width, bottom, index) =>
  svg("rect", { x, y: top, width: Math.max(width, 1), height: Math.max(0, bottom - top), class: colorOf(index) });

function stack({ series, places, x, y, wide }) {
  return places.map((_, at) => {
    let below = 0;
    return series.map((one, index) => {
      const value = one.y[at] ?? 0;
      if (value <= 0) return null;
      const made = bar(x(at) - wide * 0.4, y(below + value), wide * 0.8, y(below), index);
      below += value;
      return made;
    });
  });
}

function groups({ series, places, x, y, wide, base }) {
  const width = (wide * 0.8) / series.length;
  return places.map((_, at) =>
    series.map((one, index) => {
      const value = one.y[at];
      if (value === null) return null;
      const [top, bottom] = [y(value), base].sort((a, b) => a - b);
      return bar(x(at) - wide * 0.4 + index * width, top, width, bottom, index);
    }),
  );
}

function curves({ series, places, x, y }) {
  return series.map((one, index) => {
    // A value that is not there ends a line, and the next one begins another.
    const parts = [[]];
    one.y.forEach((value, at) => {
      if (value === null) parts.push([]);
      else parts.at(-1).push([x(at).toFixed(1), y(value).toFixed(1)]);
    });
    const style = { class: colorOf(index), "stroke-dasharray": dashOf(index) };
    return parts
      .filter((points) => points.length)
      .map((points) => [
        points.length > 1 && svg("polyline", { points: points.map((point) => point.join(",")).join(" "), ...style }),
        // A single point has no line, so it is a dot.
        (points.length === 1 || places.length <= MOST_DOTS) &&
          points.map(([cx, cy]) => svg("circle", { cx, cy, r: 2.5, class: colorOf(index) })),
      ]);
  });
}

/** Shows the values under the pointer, or of the place chosen by the arrow keys. */
function pointed(plot, tip, { series, places, unit, left, wide, width }) {
  let chosen = -1;
  const show = (at) => {
    if (at < 0 || at >= places.length) return;
    chosen = at;
    const known = series
      .map((one, index) => [one.name, one.y[at], index])
      .filter(([, value]) => value !== null && (value !== 0 || series.length === 1));
    put(
      tip,
      h("b", {}, placeText(places[at])),
      known.length
        ? known.map(([name, value, index]) => [h("br"), mark(index, "bars"), `${name} `, h("b", {}, measured(value, unit))])
        : [h("br"), "nothing"],
    );
    tip.hidden = false;
    const middle = left + (at + 0.5) * wide;
    tip.style.left = middle < width / 2 ? `${middle + wide / 2 + 4}px` : "auto";
    tip.style.right = middle < width / 2 ? "auto" : `${width - middle + wide / 2 + 4}px`;
  };
  const hide = () => {
    tip.hidden = true;
  };
  plot.setAttribute("tabindex", "0");
  plot.addEventListener("pointermove", ({ offsetX }) => show(Math.floor((offsetX - left) / wide)));
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    show(Math.min(places.length - 1, Math.max(0, chosen + by)));
  });
}
