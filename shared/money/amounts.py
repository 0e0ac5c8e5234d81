"""Formats US dollar amounts for display and for headers. Rows and counters use doubles.

`api/console_page/js/money.js` formats amounts in the same way (tests/shared/test_money.py).
"""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Context, Decimal
from functools import lru_cache

PLACES = 9
"""Maximum number of decimal places in headers and errors. A header's amount matches its rows to
within a billionth.
"""
DIGITS = 4
"""Number of significant digits shown on pages for amounts below a dollar."""
CENTS = 2
_WIDE = Context(prec=400)
"""Enough precision for any double."""


@lru_cache(maxsize=1024)
def plain(usd: float | Decimal, places: int = PLACES) -> str:
    """Returns an amount without an exponent, a currency, or trailing zeros, such as `0.0012`.

    A nonzero amount is never shown as 0.
    """
    text = _format_rounded(usd, places)
    return text.rstrip("0").rstrip(".") if "." in text else text


def amount(usd: float | Decimal) -> str:
    """Returns an amount for a page, rounded to the cent, or with more digits for small amounts."""
    places, size_usd = CENTS, abs(Decimal(usd))
    if 0 < size_usd < 1:
        exponent = int(f"{size_usd:.{DIGITS - 1}e}".partition("e")[2])
        places = min(max(CENTS, DIGITS - 1 - exponent), PLACES)
    whole, _, decimals = _format_rounded(usd, places).partition(".")
    sign, whole = whole[: whole.startswith("-")], whole.lstrip("-")
    return f"{sign}{int(whole):,}.{decimals.rstrip('0').ljust(CENTS, '0')}"


def dollars(usd: float | Decimal) -> str:
    """Returns `amount` with its currency, such as `$1,234.50` or `-$0.0109`."""
    text = amount(usd)
    return f"-${text[1:]}" if text.startswith("-") else f"${text}"


def _format_rounded(usd: float | Decimal, places: int) -> str:
    exact, unit = Decimal(usd), Decimal(1).scaleb(-places)
    rounded = exact.quantize(unit, ROUND_HALF_UP, _WIDE)
    if exact and not rounded:
        rounded = unit.copy_sign(exact)
    return f"{rounded if rounded else abs(rounded):.{places}f}"
