// Ranges of days: presets, and the two dates that a form or an address has.

export const DAY_MS = 86_400_000;
const MOST_DAYS = 400;
const RANGE = /^(\d{4}-\d{2}-\d{2})\.\.(\d{4}-\d{2}-\d{2})$/;

/** Presets by their name in addresses. */
export const PRESETS = {
  "this-month": "This month",
  "last-month": "Last month",
  "7-days": "7 days",
  "30-days": "30 days",
  "90-days": "90 days",
};

/** The reader's time zone, in which days begin. */
export const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone ?? "UTC";

/** Today in a time zone, as an ISO date. */
export function today(tz = zone(), now = new Date()) {
  // Canadian dates are ISO dates.
  return new Intl.DateTimeFormat("en-CA", { timeZone: tz }).format(now);
}

/** An ISO date some days later. */
export function plusDays(day, count) {
  return new Date(Date.parse(`${day}T00:00Z`) + count * DAY_MS).toISOString().slice(0, 10);
}

/**
 * Reads a range from an address: a preset, or `FIRST..LAST`.
 * @returns {{name: string, first: string, last: string}} both days are included.
 */
export function rangeOf(name, tz = zone()) {
  const custom = RANGE.exec(name);
  if (custom) return { name, first: custom[1], last: custom[2] };
  const last = today(tz);
  const month = last.slice(0, 7);
  if (name === "last-month") {
    const before = plusDays(`${month}-01`, -1);
    return { name, first: `${before.slice(0, 7)}-01`, last: before };
  }
  const days = /^(\d+)-days$/.exec(name);
  if (days) return { name, first: plusDays(last, 1 - Number(days[1])), last };
  return { name: "this-month", first: `${month}-01`, last };
}

let lastChosen = "";

/** The range in an address. Without one: the range that was chosen last in another view, or the usual one. */
export function openedRange(name, usual, tz = zone()) {
  if (name) lastChosen = name;
  return rangeOf(name || lastChosen || usual, tz);
}

/** The month to open: the last one if that was chosen in another view, otherwise this month. */
export const openedMonth = (tz) => rangeOf(lastChosen === "last-month" ? lastChosen : "this-month", tz).first.slice(0, 7);

/** The same for the API, whose end is the first day that is not included. */
export const asked = ({ first, last }, tz) => ({ from: first, to: plusDays(last, 1), tz });

/** Every day of a range, at most 400. */
export function daysBetween(first, last) {
  const days = [];
  for (let day = first; day <= last && days.length < MOST_DAYS; day = plusDays(day, 1)) days.push(day);
  return days;
}

/** Days in words, such as `Nov 1 – Nov 29, 2026`. */
export function daysInWords(first, last) {
  const words = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeZone: "UTC" });
  const [start, end] = [first, last].map((day) => new Date(`${day}T00:00Z`));
  return first === last ? words.format(start) : words.formatRange(start, end);
}
