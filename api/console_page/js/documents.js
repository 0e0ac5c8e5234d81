// Pages of documents as rendered Markdown, and transcripts as readable text. Null: an output has another shape.

import { h } from "./dom.js";
import { markdown } from "./markdown.js";

const MOST_PAGES = 50;
const MOST_SEGMENTS = 500;
const MOST_PIECES = 10_000;

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

/**
 * What is said in a recording: segments with `start`, `end` and `text`, in a list or in `segments`.
 * @param {?{url: string, type: string}} source the recording, if it was chosen in this tab. While it plays, the word
 *   that is said is highlighted, or the segment if the model gives no times of words.
 */
export function transcriptOf(output, source = null) {
  const segments = output?.segments ?? output;
  const isOne = (one) => typeof one?.text === "string" && typeof one.start === "number" && typeof one.end === "number";
  if (!Array.isArray(segments) || !segments.length || !segments.every(isOne)) return null;
  const player = playerOf(source);
  const text = h("p", { class: "transcript" });
  if (player) highlight(text, segments.flatMap(piecesOf), player);
  else text.append(segments.map((one) => one.text.trim()).join(" "));
  const time = ({ start }) => (player ? h("button", { type: "button", class: "quiet", "aria-label": `Play from ${clock(start)}`, on: { click: () => playFrom(player, start) } }, clock(start)) : clock(start));
  const rows = segments.slice(0, MOST_SEGMENTS).map((one) => [h("dt", {}, time(one)), h("dd", {}, one.text.trim())]);
  return h("div", { class: "stack" }, player, text, h("details", {}, h("summary", {}, "With times"), h("dl", { class: "facts" }, rows)));
}

function playerOf(source) {
  const kind = { audio: "audio", video: "video" }[source?.type.split("/")[0]];
  return kind ? h(kind, { src: source.url, controls: true, "aria-label": "Recording" }) : null;
}

function playFrom(player, seconds) {
  player.currentTime = seconds;
  player.play().catch(() => {});
}

/** The words of a segment with their times, or the segment as one piece if they do not add up to its text. */
function piecesOf({ start, end, text, words }) {
  const whole = text.trim();
  const isTimed = Array.isArray(words) && words.length && words.every((one) => typeof one.word === "string" && typeof one.start === "number");
  for (const between of ["", " "]) {
    if (!isTimed || words.map(({ word }) => word).join(between).trim() !== whole) continue;
    return words.map((one, at) => ({ ...one, text: at ? between + one.word : ` ${one.word.trimStart()}` }));
  }
  return [{ start, end, text: ` ${whole}` }];
}

/** Shows pieces of text, and highlights the spoken one. A click plays from there. Beyond MOST_PIECES, they are plain. */
function highlight(place, pieces, player) {
  const timed = pieces.slice(0, MOST_PIECES);
  const spans = timed.map(({ text, start }) => h("span", { on: { click: () => playFrom(player, start) } }, text));
  const rest = pieces.slice(MOST_PIECES).map(({ text }) => text);
  place.append(...spans, rest.join(""));
  let shown = null;
  player.addEventListener("timeupdate", () => {
    const at = timed.findLastIndex(({ start }) => start <= player.currentTime);
    shown?.classList.remove("said");
    shown = spans[at] ?? null;
    shown?.classList.add("said");
  });
}

/** Seconds as minutes and seconds. */
function clock(seconds) {
  const whole = Math.floor(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}
