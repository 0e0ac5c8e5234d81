// Shows what a prediction gave, by the shape of its output.

import { linked } from "./api.js";
import { button, download, failure, h } from "./dom.js";
import { heatMap } from "./heat_map.js";
import { dollars, timeBar } from "./timing.js";

const IMAGE_URI = /^data:image\/(png|jpeg|webp);base64,/;
const SHOWN_NUMBERS = 6;

/** The output of a finished prediction with its time and cost. */
export function resultOf(prediction, signal) {
  const { error, metrics = {}, output, status } = prediction;
  return h(
    "div",
    { class: "result" },
    error && h("p", { class: "error", role: "alert" }, error),
    status === "canceled" && h("p", { class: "note" }, "The prediction was canceled."),
    output !== null && shown(prediction, signal),
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

function shown(prediction, signal) {
  const { output } = prediction;
  const list = Array.isArray(output) ? output : [output];
  if (list.every((one) => typeof one === "string" && isImage(one))) {
    return h(
      "div",
      { class: "images" },
      list.map((link, index) => imageFigure(prediction, link, index, signal)),
    );
  }
  const save = button("Download JSON", () =>
    download(
      new Blob([JSON.stringify(output)], { type: "application/json" }),
      `${prediction.id}.json`,
    ),
  );
  if (list.every(Array.isArray)) return [heatMap(textsOf(prediction), list), save];
  if (list.length && list.every((one) => typeof one === "number")) {
    return [isVectorOf(prediction) ? vector(list) : scores(textsOf(prediction), list), save];
  }
  return [h("pre", { class: "code" }, JSON.stringify(output, null, 2)), save];
}

const isImage = (text) => IMAGE_URI.test(text) || /^https?:\/\//.test(text);

/** One text was given, so the numbers are its vector. */
const isVectorOf = ({ input }) => typeof (input.text ?? input.input) === "string";

function textsOf({ input, output }) {
  const given = input.texts ?? input.input ?? input.pairs?.map((pair) => pair.join(" · ")) ?? [];
  const texts = Array.isArray(given) ? given : [given];
  return output.map((_, index) => texts[index] ?? `#${index + 1}`);
}

function imageFigure(prediction, link, index, signal) {
  const { input } = prediction;
  const image = h("img", { alt: input.prompt ?? `output ${index + 1}`, class: "image" });
  const actions = h("div", { class: "row" });
  const extension = (type) => type.split("/").pop().replace("jpeg", "jpg");
  const offer = (href, type) =>
    actions.append(
      h("a", { href, download: `${prediction.id}-${index}.${extension(type)}` }, "Download"),
    );
  if (IMAGE_URI.test(link)) {
    image.src = link;
    offer(link, IMAGE_URI.exec(link)[1]);
  } else {
    linked(link, signal)
      .then((blob) => {
        const url = URL.createObjectURL(blob);
        signal.addEventListener("abort", () => URL.revokeObjectURL(url));
        image.src = url;
        offer(url, blob.type);
      })
      .catch((error) => error.name === "AbortError" || actions.append(failure(error)));
  }
  const seed = Number.isInteger(input.seed) ? `Seed ${input.seed + index}` : null;
  return h("figure", {}, image, h("figcaption", {}, seed && h("span", {}, seed), actions));
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
