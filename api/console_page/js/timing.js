// The bar that shows where the time of a prediction went.

import { h } from "./dom.js";

/** Milliseconds for people. */
export function duration(ms) {
  if (ms < 1) return "0 ms";
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 59_950) return `${(ms / 1000).toFixed(ms < 9_995 ? 2 : 1)} s`;
  const seconds = Math.round(ms / 1000);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

/** A moment for people. Takes Unix seconds or an ISO time. */
export function moment(when) {
  if (when === null || when === undefined) return "–";
  const date = new Date(typeof when === "number" ? when * 1000 : when);
  return date.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

/** Where a prediction stands in line, as the API says. */
export function placeInLine(queue) {
  if (!queue) return "Waits for a worker …";
  const { position, estimated_s: seconds } = queue;
  const wait = seconds === null ? "" : `, starts in about ${duration(seconds * 1000)}`;
  return `Place ${Number(position)} in line${wait}`;
}

/** The parts of a prediction's time in milliseconds. Empty until it is over. */
export function partsOf({ total_time: totalS, delayTime, executionTime }) {
  if (totalS === undefined) return { parts: [], totalMs: 0 };
  const totalMs = totalS * 1000;
  const queueMs = Math.min(delayTime ?? 0, totalMs);
  const inferenceMs = Math.min(executionTime ?? 0, totalMs - queueMs);
  const parts = [
    { name: "Queue", kind: "queue", ms: queueMs },
    { name: "Inference", kind: "inference", ms: inferenceMs },
    { name: "Batch and delivery", kind: "batch", ms: totalMs - queueMs - inferenceMs },
  ];
  return { parts, totalMs };
}

/** A bar with a legend, or only the bar. */
export function timeBar(metrics, { isSmall = false } = {}) {
  const { parts, totalMs } = partsOf(metrics ?? {});
  if (!parts.length) return isSmall ? h("span", { class: "muted" }, "–") : null;
  const words = [
    ...parts.map((part) => `${part.name} ${duration(part.ms)}`),
    `Total ${duration(totalMs)}`,
  ];
  const bar = h("div", { class: "bar", role: "img", "aria-label": words.join(", ") });
  for (const part of parts) {
    const piece = h("span", {
      class: `piece ${part.kind}`,
      title: `${part.name} ${duration(part.ms)}`,
    });
    piece.style.flexGrow = String(part.ms);
    bar.append(piece);
  }
  if (isSmall) return h("div", { class: "timed small" }, bar, h("span", {}, duration(totalMs)));
  const legend = parts.map((part) =>
    h(
      "li",
      {},
      h("span", { class: `dot ${part.kind}` }),
      `${part.name} `,
      h("b", {}, duration(part.ms)),
    ),
  );
  const total = h("li", {}, "Total ", h("b", {}, duration(totalMs)));
  return h(
    "div",
    { class: "timed" },
    bar,
    h("ul", { class: "legend", "aria-hidden": "true" }, legend, total),
  );
}
