// Makes a form from the JSON Schema of a model's input, as cog publishes it.

import { h } from "./dom.js";

const LARGEST_SEED = 2 ** 31;

/**
 * Makes the form of a model.
 * @param {object} schema of the input.
 * @returns {{element: HTMLElement, read: function(): Promise<object>}} `read` gives the input:
 *   fields that are empty are left out.
 */
export function formOf(schema) {
  const required = new Set(schema.required ?? []);
  const names = new Set(Object.keys(schema.properties ?? {}));
  const fields = Object.entries(schema.properties ?? {}).map(([name, property]) =>
    fieldOf(name, property, required.has(name)),
  );
  const isFirst = required.size
    ? (field) => field.isRequired
    : (field) => field.kind === "texts" || (field.kind === "text" && !names.has(`${field.name}s`));
  const first = fields.filter(isFirst);
  const more = fields.filter((field) => !isFirst(field));
  const element = h(
    "div",
    { class: "fields" },
    first.map((field) => field.element),
    more.length > 0 &&
      h(
        "details",
        {},
        h("summary", {}, "More options"),
        h(
          "div",
          { class: "fields narrow" },
          more.map((field) => field.element),
        ),
      ),
  );
  return { element, read: () => readAll(fields) };
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
function coreOf(property) {
  const options = (property.anyOf ?? [property]).filter((option) => option.type !== "null");
  return { core: options[0] ?? {}, isOpen: options.length > 1 };
}

function kindOf(name, core, isOpen) {
  if (isOpen) return "json";
  if (core.enum) return "choice";
  if (core.type === "boolean") return "flag";
  if (core.type === "integer" || core.type === "number") return "number";
  if (core.type === "array") return core.items?.type === "string" ? "texts" : "json";
  if (core.type !== "string") return "json";
  if (name === "image" || core.format === "uri") return "file";
  return core.pattern ? "word" : "text";
}

function fieldOf(name, property, isRequired) {
  const { core, isOpen } = coreOf(property);
  const kind = kindOf(name, core, isOpen);
  const id = `input-${name}`;
  const hint = [
    kind === "texts" && "One per line.",
    kind === "json" && "As JSON.",
    property.description,
  ]
    .filter(Boolean)
    .join(" ");
  const given = { id, name, required: isRequired, "aria-describedby": hint ? `${id}-hint` : null };
  const { control, read } = CONTROLS[kind](given, core, property);
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
    hint && h("p", { class: "hint", id: `${id}-hint` }, hint),
  );
  return { name, kind, isRequired, element, read };
}

const CONTROLS = {
  text(given, core) {
    const control = h("textarea", { ...given, rows: 2, maxlength: core.maxLength });
    return { control, read: () => control.value || undefined };
  },
  texts(given) {
    const control = h("textarea", { ...given, rows: 5 });
    const read = () => {
      const lines = control.value
        .split("\n")
        .map((line) => line.trim())
        .filter(Boolean);
      return lines.length ? lines : undefined;
    };
    return { control, read };
  },
  word(given, core) {
    const control = h("input", {
      ...given,
      type: "text",
      pattern: core.pattern,
      autocomplete: "off",
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
    const empty = property.default ?? "";
    const options = core.enum.map((value) =>
      h("option", { value, selected: value === empty }, value),
    );
    const control = h("select", given, empty === "" && h("option", { value: "" }, "—"), options);
    const read = () => (control.value === String(empty) ? undefined : control.value || undefined);
    return { control, read };
  },
  flag(given, core, property) {
    const control = h("input", { ...given, type: "checkbox", checked: property.default === true });
    return { control, read: () => control.checked };
  },
  file(given) {
    const control = h("input", {
      ...given,
      type: "file",
      accept: "image/png,image/jpeg,image/webp",
    });
    return { control, read: () => (control.files[0] ? dataUri(control.files[0]) : undefined) };
  },
  json(given) {
    const control = h("textarea", { ...given, rows: 2, spellcheck: "false" });
    const read = () => {
      if (!control.value.trim()) return undefined;
      try {
        return JSON.parse(control.value);
      } catch {
        throw new Error(`${given.name}: this is not JSON. Texts need quotes.`);
      }
    };
    return { control, read };
  },
};

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name}: the file can't be read`));
    reader.readAsDataURL(file);
  });
}
