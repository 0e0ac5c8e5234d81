// US dollars for people, as shared/money/amounts.py writes them.

const PLACES = 9;
const DIGITS = 4;
const CENTS = 2;

function rounded(usd, places) {
  const text = usd.toFixed(places);
  if (usd === 0 || Number(text) !== 0) return text;
  return (Math.sign(usd) * 10 ** -places).toFixed(places);
}

/** An amount without an exponent, a currency or trailing zeros, for programs. */
export function plain(usd, places = PLACES) {
  const text = rounded(usd, places);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

/** An amount for a page: in cents, or with the digits that a smaller one needs. */
export function amount(usd) {
  let places = CENTS;
  if (usd !== 0 && Math.abs(usd) < 1) {
    const exponent = Number(Math.abs(usd).toExponential(DIGITS - 1).split("e")[1]);
    places = Math.min(Math.max(CENTS, DIGITS - 1 - exponent), PLACES);
  }
  const [whole, decimals] = rounded(usd, places).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+$)/g, ",");
  return `${grouped}.${decimals.replace(/0+$/, "").padEnd(CENTS, "0")}`;
}

/** The same with its currency. */
export function dollars(usd) {
  const shown = amount(usd);
  return shown.startsWith("-") ? `-$${shown.slice(1)}` : `$${shown}`;
}

/**
 * Formats the amounts of one column with the same number of decimals, so that their digits are aligned.
 * An amount that would be shown as 0 is shown as less than the smallest one.
 */
export function aligned(amounts) {
  const most = amounts.reduce((largest, usd) => Math.max(largest, Math.abs(usd ?? 0)), 0);
  const exponent = most ? Math.floor(Math.log10(most)) : 0;
  const places = exponent >= 0 ? CENTS : Math.min(PLACES, Math.max(CENTS, DIGITS - 1 - exponent));
  return (usd) => {
    const least = 10 ** -places;
    if (usd !== 0 && Math.abs(usd) < least / 2) return `${usd < 0 ? ">-" : "<"}$${least.toFixed(places)}`;
    const [whole, decimals] = Math.abs(usd).toFixed(places).split(".");
    return `${usd < 0 ? "-" : ""}$${whole.replace(/\B(?=(\d{3})+$)/g, ",")}.${decimals}`;
  };
}
