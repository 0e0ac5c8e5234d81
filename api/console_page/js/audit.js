// The view "Audit log": who changed keys, plans and tenants, newest first. For keys with the scope `admin`.
// `#audit?after=ID` is the address of an older page.

import { adminPage } from "./admin.js";
import { call } from "./api.js";
import { h, listing } from "./dom.js";
import { moment } from "./timing.js";

const PAGE = 50;
const ACTIONS = {
  "directory.start": "Started the directory",
  "key.create": "Created key",
  "key.rotate": "Rotated key",
  "key.revoke": "Revoked key",
  "plan.set": "Set plan",
  "plan.remove": "Removed plan",
  "tenant.set": "Set plan of tenant",
  "tenant.freeze": "Froze tenant",
  "tenant.thaw": "Unfroze tenant",
};

/** Shows the view. */
export async function show(place, _, signal, params) {
  await adminPage(place, "Audit log", signal, async () => {
    const after = params.get("after") ?? "";
    const query = new URLSearchParams({ limit: PAGE, ...(after && { after }) });
    const { data, has_more: hasMore, last_id: last } = await call(`v1/admin/audit?${query}`, { signal });
    return [
      h("p", { class: "muted" }, "The last 10,000 changes of keys, plans and tenants. It never contains secrets."),
      data.length ? listing("Audit log", ["Time", "Who", "From", "Action", "Target", "Change"], data.map(row)) : h("p", { class: "note" }, "There are no entries here."),
      (after || hasMore) &&
        h(
          "nav",
          { class: "pager", "aria-label": "Pages" },
          after && h("a", { href: "#audit" }, "Newest"),
          hasMore && h("a", { href: `#audit?${new URLSearchParams({ after: last })}` }, "Older"),
        ),
    ];
  });
}

function row(act) {
  return [moment(act.effective_at), act.actor, act.address || "–", ACTIONS[act.type] ?? act.type, act.target, changes(act.before ?? {}, act.after ?? {})];
}

/** The fields that differ, before and after. */
function changes(before, after) {
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])];
  const words = (value) => (value === null || value === undefined || value === "" ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value));
  const changed = names.filter((name) => words(before[name]) !== words(after[name]));
  if (!changed.length) return "–";
  const list = h(
    "dl",
    { class: "facts" },
    changed.map((name) => [h("dt", {}, name), h("dd", {}, `${words(before[name])} → ${words(after[name])}`)]),
  );
  return changed.length > 3 ? h("details", {}, h("summary", {}, `${changed.length} fields`), list) : list;
}
