// An edited image over its source, with a slider between them.

import { h } from "./dom.js";

/**
 * Puts the image that a prediction began with below its result.
 * @param {HTMLElement} figure of the result, with an `img`.
 * @param {string} source URL of the image that was chosen in this tab: the API does not return it.
 */
export function compared(figure, source) {
  const after = figure.querySelector("img");
  if (!after) return figure;
  const slider = h("input", { type: "range", min: 0, max: 100, value: 50, "aria-label": "Before and after" });
  const layers = h("div", { class: "layers image" });
  const show = () => layers.style.setProperty("--before", `${slider.value}%`);
  slider.addEventListener("input", show);
  after.replaceWith(layers);
  after.classList.remove("image");
  layers.append(after, h("img", { src: source, alt: "Before", class: "before" }));
  layers.after(h("div", { class: "row between slider" }, h("span", { class: "hint" }, "Before"), slider, h("span", { class: "hint" }, "After")));
  show();
  return figure;
}
