// Rows as a CSV file, as `penstock report --format csv` writes them.

import { download } from "./dom.js";
import { plain } from "./money.js";
import { unitOf } from "./wording.js";

const PLACES = 12;

/** Offers rows as `name`.csv. Amounts have no exponent, and a cell that begins like a formula is none. */
export function saveCsv(name, heads, rows) {
  const written = (value, at) =>
    typeof value === "number" && unitOf(heads[at]) === "money" ? plain(value, PLACES) : value;
  const lines = [heads, ...rows.map((row) => row.map(written))].map((row) => row.map(quoted).join(","));
  download(new Blob([`${lines.join("\r\n")}\r\n`], { type: "text/csv" }), `${name}.csv`);
}

/** https://owasp.org/www-community/attacks/CSV_Injection */
function quoted(value) {
  const text = typeof value === "string" ? value.replace(/^[=+\-@\t\r]/, "'$&") : `${value ?? ""}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
