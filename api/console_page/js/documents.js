// Pages of documents as rendered Markdown, and transcripts as readable text. Null: an output has another shape.

import { h } from "./dom.js";
import { markdown } from "./markdown.js";

const MOST_PAGES = 50;
const MOST_SEGMENTS = 500;

/** The pages that a document model gives: objects with `markdown`, in a list or in `pages`. */
export function pagesOf(output) {
  const pages = output?.pages ?? output;
  if (!Array.isArray(pages) || !pages.length || !pages.every((page) => typeof page?.markdown === "string")) return null;
  const shown = pages.slice(0, MOST_PAGES).map((page, at) =>
    h("section", { class: "sheet", "aria-label": `Page ${at + 1}` }, h("h3", { class: "muted" }, `Page ${at + 1}`), markdown(page.markdown)),
  );
  const left = pages.length - shown.length;
  return h("div", { class: "stack" }, shown, left > 0 && h("p", { class: "muted" }, `${left} more pages are in the JSON.`));
}

/** What is said in a recording: segments with `start`, `end` and `text`, in a list or in `segments`. */
export function transcriptOf(output) {
  const segments = output?.segments ?? output;
  const isOne = (one) => typeof one?.text === "string" && typeof one.start === "number" && typeof one.end === "number";
  if (!Array.isArray(segments) || !segments.length || !segments.every(isOne)) return null;
  const text = segments.map((one) => one.text.trim()).join(" ");
  const rows = segments.slice(0, MOST_SEGMENTS).map((one) => [h("dt", {}, clock(one.start)), h("dd", {}, one.text.trim())]);
  return h(
    "div",
    { class: "stack" },
    h("p", { class: "transcript" }, text),
    h("details", {}, h("summary", {}, "With times"), h("dl", { class: "facts" }, rows)),
  );
}

/** Seconds as minutes and seconds. */
function clock(seconds) {
  const whole = Math.floor(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}
