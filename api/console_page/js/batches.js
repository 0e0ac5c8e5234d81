// The view "Batches": their progress, and their files.

import { call, send } from "./api.js";
import { badge, button, download, h, put, say, table } from "./dom.js";
import { moment } from "./timing.js";

const PAGE = 20;
const ENDS = ["failed", "completed", "expired", "cancelled", "cancelling"];

/** Shows the view. */
export async function show(place, _, signal) {
  const rows = h("div", { class: "stack" });
  const reload = button("Reload", () => show(place, _, signal));
  put(place, h("div", { class: "row between" }, h("h1", {}, "Batches"), reload), rows);
  let after = "";
  const more = button("Show more", () => page());
  async function page() {
    const query = after ? `&after=${encodeURIComponent(after)}` : "";
    const found = await call(`v1/batches?limit=${PAGE}${query}`, { signal });
    after = found.last_id;
    const heads = ["Created", "Batch", "State", "Lines", "Files", ""];
    const lines = found.data.map((batch) => row(batch, () => show(place, _, signal), signal));
    if (lines.length) rows.append(table("Batches", heads, lines));
    else if (!rows.children.length)
      rows.append(h("p", { class: "note" }, "There are no batches yet."));
    more.hidden = !found.has_more;
  }
  await page();
  place.append(more);
}

function row(batch, again, signal) {
  const files = {
    Input: batch.input_file_id,
    Output: batch.output_file_id,
    Errors: batch.error_file_id,
  };
  const links = Object.entries(files)
    .filter(([, id]) => id)
    .map(([name, id]) =>
      button(name, () => save(id, signal), {
        class: "quiet",
        "aria-label": `Download ${name.toLowerCase()} of ${batch.id}`,
      }),
    );
  const cancel =
    !ENDS.includes(batch.status) &&
    button("Cancel", async () => {
      await call(`v1/batches/${encodeURIComponent(batch.id)}/cancel`, { method: "POST", signal });
      say("The batch is being canceled.");
      await again();
    });
  const name = h(
    "div",
    {},
    h("code", {}, batch.id),
    h("div", { class: "muted" }, batch.endpoint),
    reasons(batch),
  );
  return [
    moment(batch.created_at),
    name,
    badge(batch.status),
    progress(batch),
    h("div", { class: "row" }, links),
    cancel || "",
  ];
}

function reasons({ errors }) {
  const [first] = errors?.data ?? [];
  return (
    first &&
    h(
      "div",
      { class: "error" },
      first.line ? `Line ${first.line}: ${first.message}` : first.message,
    )
  );
}

function progress({ request_counts: { total, completed, failed }, id }) {
  const words = `${completed + failed} of ${total}` + (failed ? `, ${failed} failed` : "");
  return h(
    "div",
    { class: "counts" },
    h("progress", {
      max: Math.max(1, total),
      value: completed + failed,
      "aria-label": `Progress of ${id}`,
    }),
    h("span", {}, words),
  );
}

async function save(id, signal) {
  const path = `v1/files/${encodeURIComponent(id)}`;
  const { filename } = await call(path, { signal });
  const response = await send(`${path}/content`, { signal });
  download(await response.blob(), filename);
}
