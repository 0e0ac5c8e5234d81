// One batch: its progress, files and errors.

import { call, pause, send } from "./api.js";
import { badge, button, download, failure, h, keepFocus, put, say, sayThenOpen } from "./dom.js";
import { dataTable } from "./tables.js";
import { moment } from "./timing.js";
import { count } from "./wording.js";

const ENDS = ["failed", "completed", "expired", "cancelled"];
const POLL_MS = 2000;
const NEWS = {
  validating: "The file is being checked.",
  in_progress: "The batch is running.",
  finalizing: "The result files are being written.",
  completed: "The batch is complete.",
  failed: "The batch failed.",
  expired: "The batch expired.",
  cancelling: "The batch is being canceled.",
  cancelled: "The batch was canceled.",
};

/** Address of a batch. */
export const linkTo = (id) => `#batches/${encodeURIComponent(id)}`;

const pathOf = (id) => `v1/batches/${encodeURIComponent(id)}`;

/** True if a batch can be canceled. */
export const isOpen = ({ status }) => status !== "cancelling" && !ENDS.includes(status);

/** Shows a batch, and follows it until it ends. */
export async function showBatch(place, id, signal) {
  const top = h("div", { class: "stack" });
  const told = h("div");
  put(place, h("p", { class: "no-print" }, h("a", { href: "#batches" }, "All batches")), h("h1", { class: "long" }, id), told, top);
  let shown = "";
  const draw = async () => {
    const batch = await call(pathOf(id), { signal });
    // The keyboard stays on a button while only numbers change.
    if (batch.status === shown) {
      top.querySelector(".counts").replaceWith(progress(batch));
      top.querySelector(".facts").replaceWith(facts(batch));
    } else put(top, summary(batch, draw, signal));
    if (shown && shown !== batch.status) {
      say(NEWS[batch.status]);
      keepFocus();
    }
    shown = batch.status;
    put(told);
    return batch;
  };
  let batch = await draw();
  while (!ENDS.includes(batch.status)) {
    await pause(POLL_MS, signal);
    if (signal.aborted) return;
    if (document.hidden) continue;
    try {
      batch = await draw();
    } catch (error) {
      if (signal.aborted) return;
      // A screen reader would read an error again each time it is replaced.
      if (!told.hasChildNodes()) put(told, failure(new Error(`Progress could not be read, trying again: ${error.message}`)));
    }
  }
  const errors = h("div", { class: "stack" });
  place.append(errors);
  await showErrors(batch, errors, signal);
}

function facts(batch) {
  const told = {
    Endpoint: batch.endpoint,
    Model: batch.model ?? "–",
    Created: moment(batch.created_at),
    Started: moment(batch.in_progress_at),
    Ended: moment(ENDS.map((end) => batch[`${end}_at`]).find((at) => at)),
    Expires: moment(batch.expires_at),
    "Tokens read": batch.usage ? count(batch.usage.input_tokens) : "–",
    "Tokens written": batch.usage ? count(batch.usage.output_tokens) : "–",
  };
  return h(
    "dl",
    { class: "facts" },
    Object.entries(told).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

function summary(batch, again, signal) {
  const retryAll = button("Retry", () => retry(batch, batch.input_file_id, signal), { class: "quiet" });
  const { failed, total } = batch.request_counts;
  const some = batch.error_file_id && failed < total;
  const retrySome = some && button("Retry failed lines", () => retryFailed(batch, signal), { class: "quiet" });
  return h(
    "div",
    { class: "card" },
    h(
      "div",
      { class: "row between" },
      badge(batch.status),
      h("div", { class: "row" }, isOpen(batch) && cancelButton(batch, again, signal), ENDS.includes(batch.status) && [retrySome, retryAll]),
    ),
    ENDS.includes(batch.status) && h("p", { class: "hint" }, "A retry has no webhook, and its result files are kept for the default time."),
    progress(batch),
    facts(batch),
    fileButtons(batch, signal),
  );
}

/** Cancels a batch. */
export function cancelButton({ id }, again, signal) {
  const cancel = async () => {
    const { status } = await call(`${pathOf(id)}/cancel`, { method: "POST", signal });
    say(NEWS[status]);
    await again();
  };
  return button("Cancel", cancel, { class: "quiet", "aria-label": `Cancel ${id}` });
}

/** Buttons that download the files of a batch. */
export function fileButtons(batch, signal) {
  const files = { Input: batch.input_file_id, Output: batch.output_file_id, Errors: batch.error_file_id };
  const buttons = Object.entries(files)
    .filter(([, id]) => id)
    .map(([name, id]) =>
      button(name, () => save(id, signal), { class: "quiet", "aria-label": `Download ${name.toLowerCase()} of ${batch.id}` }),
    );
  return h("div", { class: "row" }, buttons);
}

/** A bar with the number of finished lines. */
export function progress({ request_counts: { total, completed, failed }, id }) {
  const words = `${count(completed + failed)} of ${count(total)}` + (failed ? `, ${count(failed)} failed` : "");
  return h(
    "div",
    { class: "counts" },
    h("progress", { max: Math.max(1, total), value: completed + failed, "aria-label": `Progress of ${id}` }),
    h("span", {}, words),
  );
}

const contentOf = (id, signal) => send(`v1/files/${encodeURIComponent(id)}/content`, { signal });

async function save(id, signal) {
  const { filename } = await call(`v1/files/${encodeURIComponent(id)}`, { signal });
  download(await (await contentOf(id, signal)).blob(), filename);
}

/** Creates a batch with the same endpoint and metadata, and opens it. The API does not show the other terms. */
async function retry({ endpoint, metadata }, inputFileId, signal) {
  const body = { input_file_id: inputFileId, endpoint, completion_window: "24h", ...(metadata && { metadata }) };
  const batch = await call("v1/batches", { method: "POST", body, signal });
  sayThenOpen("The batch was created.", linkTo(batch.id));
}

async function retryFailed(batch, signal) {
  const failed = new Set();
  for await (const line of linesOf(batch.error_file_id, signal)) failed.add(JSON.parse(line).custom_id);
  const again = [];
  for await (const line of linesOf(batch.input_file_id, signal)) {
    if (failed.has(JSON.parse(line).custom_id)) again.push(`${line}\n`);
  }
  const body = new FormData();
  body.append("purpose", "batch");
  body.append("file", new Blob(again), `failed-lines-of-${batch.id}.jsonl`);
  const { id } = await call("v1/files", { method: "POST", body, signal });
  await retry(batch, id, signal);
}

/** Every error: why the file was rejected, and why lines failed. */
async function showErrors(batch, place, signal) {
  const rejected = batch.errors?.data ?? [];
  if (rejected.length) {
    const columns = ["line", "code", "param", "message"].map((name) => ({ name }));
    const rows = rejected.map(({ line, code, param, message }) => [line, code, param, message]);
    const note = rejected.length === 100 && h("p", { class: "muted" }, "The API reports the first 100.");
    put(place, h("h2", {}, "Errors in the file"), note, dataTable("Errors in the file", columns, rows, signal));
  }
  if (!batch.error_file_id) return;
  const loading = h("p", { class: "muted loading" }, "Loading errors …");
  place.append(loading);
  const rows = [];
  for await (const line of linesOf(batch.error_file_id, signal)) rows.push(errorRow(JSON.parse(line)));
  loading.remove();
  const columns = [{ name: "custom_id", label: "custom_id" }, { name: "status" }, { name: "code" }, { name: "message" }];
  place.append(h("h2", {}, "Failed lines"), h("p", { class: "muted" }, byCode(rows)), dataTable("Failed lines", columns, rows, signal));
}

function errorRow({ custom_id: customId, response, error }) {
  const body = response?.body ?? {};
  const told = error ?? body.error ?? body;
  return [customId, response ? String(response.status_code) : "not run", told.code ?? "", told.message ?? told.detail ?? ""];
}

function byCode(rows) {
  const counts = new Map();
  for (const [, , code] of rows) counts.set(code, (counts.get(code) ?? 0) + 1);
  return [...counts]
    .sort(([, one], [, other]) => other - one)
    .map(([code, lines]) => `${count(lines)} ${code || "without a code"}`)
    .join(", ");
}

/** Yields the lines of a file while it arrives. */
async function* linesOf(id, signal) {
  const reader = (await contentOf(id, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      yield* lines.filter((line) => line.trim());
    }
    if (rest.trim()) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}
