// Files of an output, shown as what they are: pictures, players for sound and film, or links.

import { linked } from "./api.js";
import { button, failure, h } from "./dom.js";

const DATA_URI = /^data:([\w.+-]+\/[\w.+-]+);base64,/;
const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** Whether a value of an output is a file: inside the answer, or a link to it. */
export const isFile = (value) =>
  typeof value === "string" && (DATA_URI.test(value) || (isLink(value) && URL.canParse(value)));

const isLink = (text) => /^https?:\/\/[^\s]+\/v1\/objects\/[^\s]+[?&]signature=/.test(text);

function typeOf(uri) {
  const inside = DATA_URI.exec(uri);
  return inside ? inside[1] : (new URL(uri).searchParams.get("type") ?? "");
}

/**
 * A file with a link to save it.
 * @param {string} name says what it is.
 * @param {?function(File)} edit gets an image to edit. Null: it can't be edited here.
 */
export function fileOf(prediction, uri, name, signal, edit = null) {
  const type = typeOf(uri);
  const { input } = prediction;
  const index = Number(/^output (\d+)$/.exec(name)?.[1] ?? 1) - 1;
  const player = playerOf(type, input.prompt ?? name);
  const actions = h("div", { class: "row" });
  const offer = (href, bytes) => {
    if (player) player.src = href;
    const save = `${prediction.id}-${name.replace(/^output /, "").replace(/\W+/g, "-")}`;
    actions.append(h("a", { href, download: save + extensionOf(type) }, "Download"));
    if (!edit || !IMAGES.includes(type)) return;
    const change = () => edit(new File([bytes], save + extensionOf(type), { type }));
    actions.prepend(button("Edit", change, { class: "quiet", "aria-label": `Edit ${name}` }));
  };
  if (DATA_URI.test(uri)) {
    const bytes = bytesOf(uri.replace(DATA_URI, ""));
    if (bytes) offer(uri, bytes);
    else actions.append(failure(new Error("This file is not valid Base64.")));
  } else {
    linked(uri, signal)
      .then((blob) => {
        const url = URL.createObjectURL(blob);
        signal.addEventListener("abort", () => URL.revokeObjectURL(url));
        offer(url, blob);
      })
      .catch((error) => error.name === "AbortError" || actions.append(failure(error)));
  }
  const seed = Number.isInteger(input.seed) && IMAGES.includes(type);
  const words = seed ? `Seed ${input.seed + index}` : !player && type;
  return h(
    "figure",
    {},
    player,
    h("figcaption", {}, words && h("span", {}, words), actions),
  );
}

/** Null: it is not Base64. A model may return any text. */
function bytesOf(base64) {
  try {
    return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  } catch {
    return null;
  }
}

function playerOf(type, name) {
  if (IMAGES.includes(type)) return h("img", { alt: name, class: "image" });
  if (type.startsWith("audio/")) return h("audio", { controls: true, "aria-label": name });
  if (type.startsWith("video/")) {
    return h("video", { controls: true, class: "image", "aria-label": name });
  }
  return null;
}

function extensionOf(type) {
  const end = type.split("/").pop().replace("jpeg", "jpg").replace("plain", "txt");
  return /^[a-z0-9]{1,5}$/.test(end) ? `.${end}` : "";
}
