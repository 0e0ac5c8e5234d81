// Paints the mask of an image: the area to redraw. A mask file works as well, and without a pointer.

import { h } from "./dom.js";

const COLOR = "#e0245e";
const BRUSH = { min: 1, max: 40, usual: 10 };
const PERCENT = 100;

/**
 * A painter for the image that is chosen in a picker.
 * @param {HTMLInputElement} imagePicker of the image.
 * @param {HTMLInputElement} maskPicker of a mask file. What was chosen last counts.
 * @returns {{element: HTMLElement, read: function(): ?string, empty: function()}} `read` gives the mask as a data URI, or
 *   null if nothing is painted. `empty` removes what is painted.
 */
export function maskPainter(imagePicker, maskPicker) {
  const below = h("img", { alt: "The image to paint on" });
  const canvas = h("canvas", { role: "img", "aria-label": "Painted mask" });
  const brush = h("input", { id: "mask-brush", type: "range", min: BRUSH.min, max: BRUSH.max, value: BRUSH.usual });
  const eraser = h("input", { id: "mask-eraser", type: "checkbox" });
  const clear = h("button", { type: "button", class: "quiet" }, "Clear");
  const note = h("p", { class: "hint" }, "Choose the image as a file to paint its mask here, or choose a mask file.");
  const tools = h(
    "div",
    { class: "painter", hidden: true },
    h("div", { class: "layers" }, below, canvas),
    h(
      "div",
      { class: "row" },
      h("span", { class: "labeled" }, h("label", { for: brush.id }, "Brush"), brush),
      h("label", { class: "check" }, eraser, "Erase"),
      clear,
    ),
    h("p", { class: "hint" }, "Paint over the part to redraw. With a keyboard, choose a mask file instead."),
  );
  const pen = canvas.getContext("2d");
  const state = { isPainted: false, url: "" };
  const empty = () => {
    pen.clearRect(0, 0, canvas.width, canvas.height);
    state.isPainted = false;
  };
  clear.addEventListener("click", empty);
  maskPicker.addEventListener("change", empty);
  imagePicker.addEventListener("change", () => {
    URL.revokeObjectURL(state.url);
    empty();
    const [file] = imagePicker.files;
    tools.hidden = true;
    note.hidden = false;
    if (!file) return;
    state.url = URL.createObjectURL(file);
    below.src = state.url;
  });
  below.addEventListener("load", () => {
    [canvas.width, canvas.height] = [below.naturalWidth, below.naturalHeight];
    state.isPainted = false;
    tools.hidden = false;
    note.hidden = true;
  });
  paintsWith(canvas, pen, brush, eraser, () => {
    state.isPainted = true;
    if (!maskPicker.value) return;
    maskPicker.value = "";
    maskPicker.dispatchEvent(new Event("cleared"));
  });
  return { element: h("div", {}, note, tools), read: () => (state.isPainted ? maskOf(canvas) : null), empty };
}

function paintsWith(canvas, pen, brush, eraser, onPaint) {
  let last = null;
  const at = ({ offsetX, offsetY }) => [(offsetX * canvas.width) / canvas.clientWidth, (offsetY * canvas.height) / canvas.clientHeight];
  const stroke = (event) => {
    const [x, y] = at(event);
    pen.globalCompositeOperation = eraser.checked ? "destination-out" : "source-over";
    pen.strokeStyle = COLOR;
    pen.lineCap = "round";
    pen.lineWidth = (Number(brush.value) * Math.min(canvas.width, canvas.height)) / PERCENT;
    pen.beginPath();
    pen.moveTo(...(last ?? [x, y]));
    pen.lineTo(x, y);
    pen.stroke();
    last = [x, y];
    onPaint();
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    last = null;
    stroke(event);
  });
  canvas.addEventListener("pointermove", (event) => last && stroke(event));
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { last = null; });
}

/** What is painted in white, on black, as a PNG. Null: it was erased again. */
function maskOf(painted) {
  const [white, mask] = [h("canvas"), h("canvas")];
  for (const canvas of [white, mask]) [canvas.width, canvas.height] = [painted.width, painted.height];
  const pen = white.getContext("2d");
  pen.drawImage(painted, 0, 0);
  if (!pen.getImageData(0, 0, white.width, white.height).data.some((value, at) => at % 4 === 3 && value)) return null;
  pen.globalCompositeOperation = "source-in";
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, white.width, white.height);
  const paper = mask.getContext("2d");
  paper.fillStyle = "#000";
  paper.fillRect(0, 0, mask.width, mask.height);
  paper.drawImage(white, 0, 0);
  return mask.toDataURL("image/png");
}
