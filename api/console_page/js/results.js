// Shows what a prediction gave, by the shape of its output.

import { compared } from "./comparison.js";
import { button, download, h, table } from "./dom.js";
import { pagesOf, transcriptOf } from "./documents.js";
import { heatMap } from "./heat_map.js";
import { markdown } from "./markdown.js";
import { dollars } from "./money.js";
import { fileOf, isFile } from "./output_files.js";
import { timeBar } from "./timing.js";

const SHOWN_NUMBERS = 6;
const MOST_ROWS = 200;
const BAR = /^\s*\d+%\|/;

/**
 * The output of a finished prediction with its time and cost.
 * @param {?{url: string, type: string}} source the file that it began with, if it was chosen in this tab.
 * @param {?function(File)} edit gets an image of the output to edit.
 */
export function resultOf(prediction, signal, source = null, edit = null) {
  const { error, metrics = {}, output, status } = prediction;
  return h(
    "div",
    { class: "result" },
    error && h("p", { class: "error", role: "alert" }, error),
    status === "canceled" && h("p", { class: "note" }, "The prediction was canceled."),
    output !== null && shown(prediction, signal, source, edit),
    prediction.logs &&
      !BAR.test(prediction.logs) &&
      h(
        "details",
        { open: status === "failed" },
        h("summary", {}, "Logs"),
        h("pre", { class: "code logs" }, prediction.logs),
      ),
    timeBar(metrics),
    metrics.cost_usd !== undefined &&
      h(
        "p",
        { class: "muted" },
        `Cost ${dollars(metrics.cost_usd)}`,
        metrics.device_time !== undefined &&
          ` · device ${(metrics.device_time * 1000).toFixed(1)} ms`,
      ),
  );
}

function shown(prediction, signal, source, edit) {
  const { input, output } = prediction;
  const isWritten = typeof output === "string" && (input.messages || input.prompt);
  if (isWritten) return output.trim() ? markdown(output) : h("p", { class: "note" }, "The model wrote nothing. Text models that are made for chats need messages instead of a prompt.");
  const document = pagesOf(output) ?? transcriptOf(output, source);
  if (document) return [document, saveOf(prediction)];
  const list = Array.isArray(output) ? output : [output];
  if (list.length && list.every(isFile)) {
    const files = list.map((uri, index) => fileOf(prediction, uri, `output ${index + 1}`, signal, edit));
    return h("div", { class: "images" }, source?.type.startsWith("image/") ? files.map((file) => compared(file, source.url)) : files);
  }
  const save = saveOf(prediction);
  if (list.length && list.every(isVector)) return [heatMap(textsOf(prediction), list), save];
  if (list.length && list.every((one) => typeof one === "number")) {
    return [isVectorOf(prediction) ? vector(list) : scores(textsOf(prediction), list), save];
  }
  return [valueOf(prediction, output, "output", signal), save];
}

const saveOf = ({ id, output }) =>
  button("Download JSON", () => download(new Blob([JSON.stringify(output)], { type: "application/json" }), `${id}.json`));

const isVector = (one) => Array.isArray(one) && one.every((part) => typeof part === "number");
const isNested = (one) => one !== null && typeof one === "object";
const isObject = (one) => one !== null && typeof one === "object" && !Array.isArray(one);

/** Any value: files as what they are, lists of objects as tables, the rest as text. */
function valueOf(prediction, value, name, signal) {
  if (isFile(value)) return fileOf(prediction, value, name, signal);
  if (typeof value === "string") return h("pre", { class: "code" }, value);
  const inner = (one, field) => cellOf(prediction, one, `${name}.${field}`, signal);
  if (Array.isArray(value) && value.length && value.every(isObject)) {
    const heads = [...new Set(value.flatMap((row) => Object.keys(row)))];
    const rows = value
      .slice(0, MOST_ROWS)
      .map((row, at) => heads.map((head) => inner(row[head], `${at}.${head}`)));
    const left = value.length - rows.length;
    return [table(name, heads, rows), left > 0 && h("p", { class: "muted" }, `${left} rows more.`)];
  }
  if (Array.isArray(value) && value.length && value.every((one) => typeof one === "string")) {
    return h("pre", { class: "code" }, value.join(/\s$/.test(value[0]) ? "" : "\n"));
  }
  if (isObject(value)) {
    const facts = Object.entries(value).map(([field, one]) => [
      h("dt", {}, field),
      h("dd", {}, isNested(one) ? valueOf(prediction, one, field, signal) : inner(one, field)),
    ]);
    return h("dl", { class: "facts" }, facts);
  }
  return h("pre", { class: "code" }, JSON.stringify(value, null, 2));
}

function cellOf(prediction, value, name, signal) {
  if (value === null || value === undefined) return "—";
  if (isFile(value)) return fileOf(prediction, value, name, signal);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** One text was given, so the numbers are its vector. */
const isVectorOf = ({ input }) => typeof (input.text ?? input.input) === "string";

function textsOf({ input, output }) {
  const given = input.texts ?? input.input ?? input.pairs?.map((pair) => pair.join(" · ")) ?? [];
  const texts = Array.isArray(given) ? given : [given];
  return output.map((_, index) => texts[index] ?? `#${index + 1}`);
}

function vector(numbers) {
  const start = numbers
    .slice(0, SHOWN_NUMBERS)
    .map((number) => number.toFixed(4))
    .join(", ");
  return h("p", { class: "code" }, `${numbers.length} numbers: ${start}, …`);
}

function scores(texts, numbers) {
  const rows = numbers.map((number, index) =>
    h(
      "li",
      {},
      h("span", { class: "long" }, texts[index]),
      h("meter", { min: 0, max: 1, value: Math.max(0, number), "aria-label": texts[index] }),
      h("b", {}, number.toFixed(3)),
    ),
  );
  return h("ol", { class: "scores" }, rows);
}
