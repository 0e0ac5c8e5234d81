// The view "Batches": a list with filters, and a form that creates a batch from a file.
// `#batches?status=failed&after=ID` is the address of a page, and `#batches/ID` that of a batch.

import { call } from "./api.js";
import { badge, button, failure, h, listing, put, sayThenOpen } from "./dom.js";
import { cancelButton, fileButtons, isOpen, linkTo, progress, showBatch } from "./batch.js";
import { addressOf, filtersOf, keepFocusOn, keyLink, listControls, ownScope, pageLinks, queryOf } from "./listing.js";
import { moment } from "./timing.js";

const VIEW = "batches";
const PAGE = 20;
const STATES = ["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"];
const FIRST_LINE_BYTES = 4 * 1024 * 1024;
const HEADS = ["Created", "Batch", "State", "Lines", "Model", "Key", "Files", ""];

/** Shows the view. */
export async function show(place, [id], signal, params) {
  await (id ? showBatch(place, id, signal) : list(place, signal, params));
}

async function list(place, signal, params) {
  const rows = h("div", { class: "stack" }, h("p", { class: "muted loading" }, "Loading …"));
  const again = () => fill(rows, params, again, signal);
  const [scope, controls] = await Promise.all([ownScope(signal), listControls(VIEW, "Batch", params, STATES, signal)]);
  put(
    place,
    h("div", { class: "row between" }, h("div", {}, h("h1", {}, "Batches"), h("p", { class: "scope" }, scope)), button("Reload", again)),
    creation(signal),
    controls,
    rows,
  );
  await again();
}

/** Shows a page. Cancel and Reload draw it again, but not the form and the controls above it. */
async function fill(rows, params, again, signal) {
  const after = params.get("after");
  const query = queryOf(params, { limit: PAGE, ...(after && { after }) });
  const { data, has_more: hasMore, last_id: last, created_before: before } = await page(query, signal);
  if (before) {
    put(rows, h("p", { class: "note" }, "None of the newest batches in this range matches. Older ones may."), older(params, before));
    return;
  }
  put(
    rows,
    data.length ? listing("Batches", HEADS, data.map((batch) => row(batch, params, () => redraw(batch, rows, again), signal))) : none(params),
    pageLinks(VIEW, params, "after", hasMore && last),
  );
}

/** Reads a page. If none of many batches matches, the API refuses with the time from which to search on. */
async function page(query, signal) {
  try {
    return await call(`v1/batches?${query}`, { signal });
  } catch (error) {
    if (!error.createdBefore) throw error;
    return { data: [], created_before: error.createdBefore };
  }
}

const older = (params, before) =>
  h(
    "nav",
    { class: "pager no-print", "aria-label": "Pages" },
    h("a", { href: addressOf(VIEW, { ...filtersOf(params), created_before: before }) }, "Older"),
  );

async function redraw(batch, rows, again) {
  await again();
  keepFocusOn(linkTo(batch.id), rows);
}

function none(params) {
  if (params.get("after")) return h("p", { class: "note" }, "There are no older batches.");
  return h("p", { class: "note" }, Object.keys(filtersOf(params)).length ? "No batch matches these filters." : "There are no batches yet.");
}

function row(batch, params, again, signal) {
  const [first, ...more] = batch.errors?.data ?? [];
  const name = h(
    "div",
    {},
    h("a", { href: linkTo(batch.id) }, batch.id),
    h("div", { class: "muted" }, batch.endpoint),
    first && h("div", { class: "error" }, first.line ? `Line ${first.line}: ${first.message}` : first.message),
    more.length > 0 && h("div", { class: "hint" }, `${more.length} more`),
  );
  return [
    moment(batch.created_at),
    name,
    badge(batch.status),
    progress(batch),
    batch.model ?? "–",
    keyLink(VIEW, params, batch.api_key_id),
    fileButtons(batch, signal),
    isOpen(batch) ? cancelButton(batch, again, signal) : "",
  ];
}

/** Uploads a file, and creates a batch of its lines. Its first line names the endpoint. */
function creation(signal) {
  const file = h("input", { id: "batch-file", type: "file", accept: ".jsonl,application/jsonl", required: true });
  const told = h("div");
  const start = h("button", { class: "main" }, "Create batch");
  const submit = async (event) => {
    event.preventDefault();
    start.disabled = true;
    try {
      put(told, h("p", { class: "muted" }, "Uploading …"));
      const endpoint = await endpointOf(file.files[0]);
      const batch = await createBatch(file.files[0], endpoint, signal);
      sayThenOpen("The batch was created.", linkTo(batch.id));
    } catch (error) {
      if (!signal.aborted) put(told, failure(error));
    } finally {
      start.disabled = false;
    }
  };
  return h(
    "details",
    { class: "card no-print" },
    h("summary", {}, "New batch"),
    h(
      "form",
      { class: "fields", on: { submit } },
      h(
        "div",
        { class: "field" },
        h("label", { for: file.id }, "JSONL file"),
        file,
        h("p", { class: "hint" }, "One request per line, with custom_id, method, url and body. All lines must have the same url and model."),
      ),
      told,
      h("div", {}, start),
    ),
  );
}

async function endpointOf(file) {
  const lines = (await file.slice(0, FIRST_LINE_BYTES).text()).split("\n");
  const first = lines.findIndex((line) => line.trim());
  if (first < 0) throw new Error("the file has no lines");
  let url;
  try {
    ({ url } = JSON.parse(lines[first]));
  } catch {
    throw new Error(`line ${first + 1} of the file is not valid JSON`);
  }
  if (typeof url !== "string") throw new Error(`line ${first + 1} of the file has no url, such as /v1/embeddings`);
  return url;
}

async function createBatch(file, endpoint, signal) {
  const body = new FormData();
  body.append("purpose", "batch");
  body.append("file", file, file.name);
  const { id } = await call("v1/files", { method: "POST", body, signal });
  return call("v1/batches", { method: "POST", body: { input_file_id: id, endpoint, completion_window: "24h" }, signal });
}
