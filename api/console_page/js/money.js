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
