// Makes a form from the JSON Schema of a model's input, as cog publishes it.

import { upload } from "./api.js";
import { h, put } from "./dom.js";
import { maskPainter } from "./mask_painter.js";

const LARGEST_SEED = 2 ** 31;
const LARGEST_INSIDE = 1024 * 1024;
/** Images in the inputs of image models, whose schema does not call them files. */
const IMAGES = ["image", "mask", "control_image", "ip_adapter_image"];
/** Fields that change an image instead of drawing a new one. */
const EDITING = ["image", "mask", "strength", "mask_blur", "padding"];
/** Shown by the API in place of a secret. */
export const SECRET = "**********";
/** What fields of known names begin with, so that a model can be tried at once. */
const EXAMPLES = {
  prompt: "a large red circle on a white background",
  query: "How do I reset my password?",
  texts: [
    "I forgot my password and can't sign in.",
    "How do I get back into my account?",
    "The kitten is asleep on the windowsill.",
    "A young cat dozes by the window.",
  ],
};

/**
 * Makes the form of a model.
 * @param {object} schema of the input.
 * @returns {{element: HTMLElement, read: function(): Promise<object>, source: function(): ?File, fill: function(object), edit: ?function(File)}}
 *   `read` gives the input: fields that are empty are left out. `source` gives the chosen file, preferably that of
 *   `image`. `fill` shows an earlier input. `edit` chooses an image to paint a mask on; null without masks.
 */
export function formOf(schema) {
  const required = new Set(schema.required ?? []);
  const names = new Set(Object.keys(schema.properties ?? {}));
  const order = ([, one], [, other]) => (one["x-order"] ?? 0) - (other["x-order"] ?? 0);
  const fields = Object.entries(schema.properties ?? {})
    .sort(order)
    .map(([name, property]) => fieldOf(name, property, required.has(name)));
  const isFirst = required.size
    ? (field) => field.isRequired
    : (field) => field.kind === "texts" || (field.kind === "text" && !names.has(`${field.name}s`));
  const image = paintMask(fields);
  const first = fields.filter(isFirst);
  const editing = image ? EDITING.map((name) => fields.find((field) => field.name === name)).filter((field) => field && !isFirst(field)) : [];
  const more = fields.filter((field) => !isFirst(field) && !editing.includes(field));
  const element = h(
    "div",
    { class: "fields" },
    first.map((field) => field.element),
    folded("Edit an image", editing),
    folded("More options", more),
  );
  const source = () => {
    // A result does not begin with a mask or an image that only guides it.
    const chosen = fields.filter(({ name, picker }) => picker?.files[0] && (name === "image" || !IMAGES.includes(name)));
    return (chosen.find(({ name }) => name === "image") ?? chosen[0])?.picker.files[0] ?? null;
  };
  const edit = (file) => {
    image.choose(file);
    reveal(image);
    image.element.scrollIntoView({ block: "start" });
  };
  return { element, read: () => readAll(fields), source, fill: (input) => fillAll(fields, input), edit: image && edit };
}

function folded(title, fields) {
  if (!fields.length) return null;
  const elements = fields.map((field) => field.element);
  return h("details", {}, h("summary", {}, title), h("div", { class: "fields narrow" }, elements));
}

function reveal({ element }) {
  const details = element.closest("details");
  if (details) details.open = true;
}

/** Shows an earlier input. The API does not show secrets, and files are shown by their URLs. */
function fillAll(fields, input) {
  for (const field of fields) {
    const value = input[field.name] ?? null;
    if (value === SECRET) continue;
    field.write(value);
    if (value !== null) reveal(field);
  }
}

/** Adds a painter to the field `mask`. Returns the field `image`, or null if the model has no masks. */
function paintMask(fields) {
  const [image, mask] = ["image", "mask"].map((name) => fields.find((field) => field.name === name && field.kind === "file"));
  if (!image || !mask) return null;
  const painter = maskPainter(image.picker, mask.picker);
  mask.element.querySelector("label").after(painter.element);
  mask.element.querySelector("input[type=url]").addEventListener("input", painter.empty);
  const readFile = mask.read;
  mask.read = async () => painter.read() ?? readFile();
  return image;
}

async function readAll(fields) {
  const input = {};
  for (const field of fields) {
    const value = await field.read();
    if (value !== undefined) input[field.name] = value;
  }
  return input;
}

/** The schema of a property, without the null of optional ones. */
export function coreOf(property) {
  const options = (property.anyOf ?? [property]).filter((option) => option.type !== "null");
  return { core: options[0] ?? {}, isOpen: options.length > 1 };
}

function kindOf(name, core, isOpen) {
  if (isOpen) return "json";
  if (core.enum) return "choice";
  if (core.type === "boolean") return "flag";
  if (core.type === "integer" || core.type === "number") return "number";
  if (core.type === "array") return listKindOf(core.items ?? {});
  if (core.type !== "string") return "json";
  if (IMAGES.includes(name) || core.format === "uri") return "file";
  if (core.format === "password") return "secret";
  return core.pattern ? "word" : "text";
}

function listKindOf(items) {
  if (items.type !== "string" || items.enum) return "json";
  return items.format === "uri" ? "files" : "texts";
}

/** What a number may be, in words. Empty: anything. */
function boundsOf({ minimum, maximum }) {
  if (minimum !== undefined && maximum !== undefined) return `${minimum} to ${maximum}.`;
  if (minimum !== undefined) return `${minimum} or more.`;
  return maximum === undefined ? "" : `${maximum} or less.`;
}

function fieldOf(name, property, isRequired) {
  const { core, isOpen } = coreOf(property);
  const kind = kindOf(name, core, isOpen);
  const id = `input-${name}`;
  const hint = [
    kind === "texts" && "One per line.",
    kind === "json" && "As JSON.",
    property.deprecated && "Deprecated.",
    kind === "number" && boundsOf(core),
    property.description,
  ]
    .filter(Boolean)
    .join(" ");
  const given = { id, name, required: isRequired, "aria-describedby": hint ? `${id}-hint` : null };
  const { control, read, write, picker, choose } = CONTROLS[kind](given, core, property);
  const element = h(
    "div",
    { class: `field ${kind}` },
    h(
      "label",
      { for: id },
      property.title ?? name,
      isRequired && h("span", { class: "muted" }, " (required)"),
    ),
    control,
    hint && h("p", { class: "hint", id: `${id}-hint` }, withCode(hint)),
  );
  return { name, kind, isRequired, element, read, write: write ?? ((value) => { control.value = value ?? ""; }), picker, choose };
}

/** A text whose parts in backticks are code. */
const withCode = (text) => text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));

const CONTROLS = {
  text(given, core, property) {
    const control = h("textarea", {
      ...given,
      rows: 2,
      minlength: core.minLength,
      maxlength: core.maxLength,
      placeholder: property.default,
    });
    control.value = exampleOf(given, property, "");
    return { control, read: () => control.value || undefined };
  },
  texts(given, core, property) {
    const control = h("textarea", { ...given, rows: 5 });
    control.value = exampleOf(given, property, []).join("\n");
    const read = () => {
      const lines = control.value
        .split("\n")
        .map((line) => line.trim())
        .filter(Boolean);
      return lines.length ? lines : undefined;
    };
    const write = (value) => {
      control.value = (value ?? []).join("\n");
    };
    return { control, read, write };
  },
  secret(given) {
    const control = h("input", { ...given, type: "password", autocomplete: "off" });
    return { control, read: () => control.value || undefined };
  },
  word(given, core, property) {
    const control = h("input", {
      ...given,
      type: "text",
      pattern: core.pattern,
      autocomplete: "off",
      placeholder: property.default,
    });
    return { control, read: () => control.value.trim() || undefined };
  },
  number(given, core, property) {
    const isSeed = given.name === "seed";
    const control = h("input", {
      ...given,
      type: "number",
      min: core.minimum ?? core.exclusiveMinimum,
      max: core.maximum,
      step: core.type === "integer" ? 1 : "any",
      placeholder: isSeed ? "random" : property.default,
    });
    const read = () => {
      if (control.value !== "") return Number(control.value);
      // Chosen here, so that the image can be shown with the seed that draws it again.
      return isSeed ? Math.floor(Math.random() * LARGEST_SEED) : undefined;
    };
    return { control, read };
  },
  choice(given, core, property) {
    const values = core.enum.filter((value) => value !== null);
    const options = values.map((value) =>
      h("option", { value, selected: value === property.default }, value),
    );
    const isOpen = property.default === undefined || property.default === null;
    const control = h("select", given, isOpen && h("option", { value: "" }, "—"), options);
    // A choice may be among numbers.
    const chosen = () => values.find((value) => String(value) === control.value);
    const write = (value) => {
      control.value = String(value ?? property.default ?? "");
    };
    return { control, read: () => (chosen() === property.default ? undefined : chosen()), write };
  },
  flag(given, core, property) {
    const control = h("input", { ...given, type: "checkbox", checked: property.default === true });
    const write = (value) => {
      control.checked = value ?? property.default === true;
    };
    return { control, read: () => control.checked, write };
  },
  file(given, core) {
    const { required, ...picked } = given;
    const accept = core.format === "uri" ? null : "image/png,image/jpeg,image/webp,image/avif,image/gif,image/tiff,image/bmp";
    const picker = h("input", { ...picked, type: "file", accept });
    const url = h("input", {
      type: "url",
      placeholder: "or an https URL",
      "aria-label": `URL of ${given.name}`,
    });
    const read = async () => {
      if (picker.files[0]) return uriOf(picker.files[0]);
      if (url.value.trim()) return url.value.trim();
      if (required) throw new Error(`${given.name}: choose a file, or give its URL.`);
      return undefined;
    };
    const write = (value) => {
      url.value = value ?? "";
    };
    const choose = (file) => {
      const files = new DataTransfer();
      files.items.add(file);
      picker.files = files.files;
      url.value = "";
      picker.dispatchEvent(new Event("change"));
    };
    return { control: h("div", { class: "stack" }, picker, previewOf(picker), url), read, write, picker, choose };
  },
  files(given) {
    const picker = h("input", { ...given, type: "file", multiple: true });
    const note = h("p", { class: "hint", hidden: true });
    let earlier;
    const read = () => (picker.files.length ? Promise.all(Array.from(picker.files, uriOf)) : earlier);
    /** Files of an earlier input, which stay until others are chosen. */
    const write = (value) => {
      earlier = Array.isArray(value) && value.length ? value : undefined;
      note.hidden = !earlier;
      note.textContent = earlier ? `${earlier.length} files of the earlier input, unless you choose others.` : "";
    };
    return { control: h("div", { class: "stack" }, picker, previewOf(picker), note), read, write };
  },
  json(given, core, property) {
    const placeholder = property.default === undefined ? null : JSON.stringify(property.default);
    const control = h("textarea", { ...given, rows: 2, spellcheck: "false", placeholder });
    const read = () => {
      if (!control.value.trim()) return undefined;
      try {
        return JSON.parse(control.value);
      } catch {
        throw new Error(`${given.name}: this is not JSON. Texts need quotes.`);
      }
    };
    const write = (value) => {
      control.value = value === null ? "" : JSON.stringify(value);
    };
    return { control, read, write };
  },
};

/** The example of a field: the schema's own, or one by its name. `none` has the type of the field. */
function exampleOf({ name, required }, property, none) {
  const own = property.examples?.[0] ?? (required || name === "texts" ? EXAMPLES[name] : none);
  return typeof own === typeof none && Array.isArray(own) === Array.isArray(none) ? own : none;
}

/** Images and recordings that are chosen, before they are sent. */
function previewOf(picker) {
  const place = h("div", { class: "previews" });
  let urls = [];
  const show = () => {
    urls.forEach((url) => URL.revokeObjectURL(url));
    urls = [];
    put(
      place,
      Array.from(picker.files, (file) => {
        const kind = { image: "img", audio: "audio", video: "video" }[file.type.split("/")[0]];
        if (!kind) return null;
        const src = URL.createObjectURL(file);
        urls.push(src);
        const name = { src, [kind === "img" ? "alt" : "aria-label"]: `Preview of ${file.name}` };
        return h(kind, kind === "img" ? { ...name, class: "image" } : { ...name, controls: true });
      }),
    );
  };
  picker.addEventListener("change", show);
  picker.addEventListener("cleared", show);
  return place;
}

/** A file in an input: itself if it is small, otherwise where it was uploaded to. */
function uriOf(file) {
  return file.size > LARGEST_INSIDE ? upload(file) : dataUri(file);
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name}: the file can't be read`));
    reader.readAsDataURL(file);
  });
}
