"""Monthly invoices, created from the `invoice` report's lines.

Rounding: a line's amount is the sum of its rows' costs, rounded half up to a millionth of a dollar.
The total is the sum of the lines as shown. The amount due is the total, rounded half up to a cent
(the only other rounding), plus tax on that amount. The printed numbers therefore add up, and differ
from the rows by less than half a millionth of a dollar per line.

An invoice is also rendered as a printable page (A4 or Letter) that states these rules.
"""

from __future__ import annotations

import csv
import hashlib
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import ROUND_HALF_UP, Decimal
from importlib import resources
from typing import Any

from shared.money.amounts import PLACES, plain
from shared.reports.definitions import find_zone
from shared.reports.runner import ReportResult
from shared.settings import InvoiceSettings

LINE_USD = Decimal("0.000001")
CENT_USD = Decimal("0.01")
MILLION = 1_000_000
CSV_HEADS = (
    *("invoice", "tenant", "month", "position", "model", "unit", "price_version"),
    *("unit_price_usd", "kind", "charged_share", "items", "quantity", "amount_usd"),
    *("invoice_total_usd", "amount_due_usd", "tax_usd", "price_per"),
)
PRICE_PLACES = range(PLACES, 16)
"""Number of decimal places in a unit price. An average over many units has more decimal places than
a catalog price.
"""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")

RULES = (
    "An item that was computed and delivered costs its price. A result from the cache, or of an "
    "identical item in another request, costs the share of the price that the model's entry "
    "specifies.",
    "Items that failed, were late or were canceled cost nothing. Exception: if a text was "
    "canceled or late after its reader had received tokens, those tokens and its prompt are "
    "charged. Requests that were rejected are not on the invoice.",
    "Tokens read, written and found in the cache have separate prices, and so do images of "
    "different sizes and requests to custom models. The unit price in a line for them is their "
    "average. Recordings are billed by the second, speech by the character, and documents by the "
    "page.",
    "Lines of batches cost the share of the price that the plan specifies.",
    "A price applies to requests received from its start time on. A month with two prices has "
    "lines for both.",
    "A line is quantity x unit price x share: the sum of its items, rounded half up to a millionth"
    " of a dollar. The total is the sum of the lines. The amount due is the total, rounded half up"
    " to a cent, and the tax on that, if any, rounded in the same way.",
)


@dataclass(frozen=True)
class InvoiceTerms:
    """The seller's name and address, and the tax added to each total."""

    seller: str = ""
    """Lines of text. Not shown if empty."""
    tax_name: str = "Tax"
    tax_percent: Decimal = Decimal(0)
    """If 0, invoices have no tax line."""


@dataclass(frozen=True)
class InvoiceLine:
    """One model's usage at one price, and the charge for it."""

    position: int
    """Line number, from 1."""
    model: str
    unit: str
    """Unit of `quantity`: tokens, images, seconds, characters, pages, or requests."""
    price_version: str | None
    unit_price_usd: Decimal | None
    """Price of `price_per` units. None if the rows are from an old release and were not charged."""
    price_per: int
    """Number of units, such as a million tokens, covered by the unit price."""
    kind: str
    """computed, cached, failed, expired, or canceled."""
    charged_share: Decimal
    items: int
    quantity: int
    amount_usd: Decimal

    @property
    def unit_price(self) -> str:
        """Returns the unit price with as many decimal places as the amount requires.

        Empty if there is none.

        The quantity times this price, rounded the same way, equals the amount.
        """
        price = self.unit_price_usd
        if price is None:
            return ""
        for places in PRICE_PLACES:
            text = plain(price, places)
            product = self.quantity * Decimal(text) / self.price_per * self.charged_share
            if product.quantize(LINE_USD, ROUND_HALF_UP) == self.amount_usd:
                return text
        return plain(price, PRICE_PLACES[-1])


@dataclass(frozen=True)
class Invoice:
    """One tenant's bill for one month."""

    number: str
    tenant: str
    month: date
    tz: str
    """Time zone in which the month is defined."""
    lines: Sequence[InvoiceLine]
    is_final: bool
    """False until the month is over, because charges may still be added."""
    terms: InvoiceTerms = InvoiceTerms()

    @property
    def total_usd(self) -> Decimal:
        return sum((line.amount_usd for line in self.lines), Decimal(0))

    @property
    def net_usd(self) -> Decimal:
        """Returns the total, rounded to cents."""
        return self.total_usd.quantize(CENT_USD, ROUND_HALF_UP)

    @property
    def tax_usd(self) -> Decimal:
        """Returns the tax on the rounded total, rounded to cents."""
        return (self.net_usd * self.terms.tax_percent / 100).quantize(CENT_USD, ROUND_HALF_UP)

    @property
    def due_usd(self) -> Decimal:
        """Returns the rounded total plus tax."""
        return self.net_usd + self.tax_usd

    @property
    def issued_on(self) -> date:
        """Returns the day after the month ends."""
        return day_after(self.month)


def terms_of(settings: InvoiceSettings) -> InvoiceTerms:
    """Returns the terms in the settings."""
    return InvoiceTerms(
        settings.invoice_seller, settings.invoice_tax_name, settings.invoice_tax_percent
    )


def invoices(result: ReportResult, terms: InvoiceTerms) -> list[Invoice]:
    """Returns one invoice per tenant and month, from a result of the `invoice` report."""
    lines: dict[tuple[str, date], list[dict[str, Any]]] = {}
    for record in result.records():
        # Rows without a tenant belong to no customer. The data_quality report counts them.
        if record["tenant"]:
            lines.setdefault((record["tenant"], record["month"]), []).append(record)
    # A query for a month that has not ended is cut off at the current time.
    until = result.question.until.astimezone(find_zone(result.question.tz)).date()
    return [
        Invoice(
            number_of(tenant, month),
            tenant,
            month,
            result.question.tz,
            [_line(at, record) for at, record in enumerate(records, start=1)],
            day_after(month) <= until,
            terms,
        )
        for (tenant, month), records in sorted(lines.items())
    ]


def day_after(month: date) -> date:
    """Returns the first day of the next month."""
    return (month.replace(day=1) + timedelta(days=32)).replace(day=1)


def number_of(tenant: str, month: date) -> str:
    """Returns the invoice number, which is unchanged if the invoice is recreated.

    It has 32 bits of the tenant's digest, so two tenants are unlikely to share a number.
    """
    digest = hashlib.sha256(tenant.encode()).hexdigest()[:8].upper()
    return f"{month:%Y%m}-{digest}"


def _line(position: int, record: dict[str, Any]) -> InvoiceLine:
    price = record["unit_price_usd"]
    return InvoiceLine(
        position=position,
        model=record["model"],
        unit=record["unit"],
        price_version=record["price_version"],
        unit_price_usd=None if price is None else Decimal(repr(price)),
        price_per=record["price_per"],
        kind=record["kind"],
        charged_share=Decimal(repr(record["charged_share"])),
        items=record["items"],
        quantity=record["quantity"],
        # Uses the amount's decimal digits, because the double for an amount such as 0.0000025 is
        # slightly too low.
        amount_usd=Decimal(repr(record["amount_usd"] or 0)).quantize(LINE_USD, ROUND_HALF_UP),
    )


def invoices_csv(invoices: Sequence[Invoice]) -> bytes:
    """Returns CSV with one row per invoice line."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(CSV_HEADS)
    for invoice in invoices:
        for line in invoice.lines:
            writer.writerow(
                (
                    *(invoice.number, plain_cell(invoice.tenant), f"{invoice.month:%Y-%m}"),
                    *(line.position, plain_cell(line.model), line.unit, line.price_version),
                    *(line.unit_price, line.kind, f"{line.charged_share:f}"),
                    *(line.items, line.quantity, line.amount_usd),
                    *(invoice.total_usd, invoice.due_usd, invoice.tax_usd, line.price_per),
                )
            )
    return file.getvalue().encode()


def plain_cell(text: str) -> str:
    """Returns a CSV cell that spreadsheets do not treat as a formula.

    Needed because other people choose these names.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    return f"'{text}" if text.startswith(_FORMULA) else text


def invoice_page(invoices: Sequence[Invoice]) -> bytes:
    """Returns an HTML page with one or more invoices, each on a separate sheet."""
    style = resources.files("shared.reports").joinpath("invoice.css").read_text(encoding="utf-8")
    title = f"Invoice {invoices[0].number}" if len(invoices) == 1 else "Invoices"
    sheets = "".join(_sheet(invoice) for invoice in invoices) or "<p>Nothing was used.</p>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{sheets}</main></body></html>\n"
    ).encode()


def _sheet(invoice: Invoice) -> str:
    lines = "".join(_page_line(line) for line in invoice.lines)
    rules = "".join(f"<li>{html.escape(rule)}</li>" for rule in RULES)
    return (
        f'<article id="{invoice.number}"><header><h1>Invoice {invoice.number}</h1><dl>'
        f"{_seller_facts(invoice)}<dt>Customer</dt><dd>{html.escape(invoice.tenant)}</dd>"
        f"<dt>Month</dt><dd>{invoice.month:%B %Y} ({html.escape(invoice.tz)})</dd>"
        f"<dt>Issued on</dt><dd>{_date_in_words(invoice)}</dd>"
        f"<dt>Amount due</dt><dd><b>${invoice.due_usd:,}</b></dd></dl></header>"
        '<div class="table" tabindex="0" role="region" aria-label="Lines"><table>'
        '<thead><tr><th scope="col">No.</th><th scope="col">Model</th>'
        '<th scope="col">What</th><th scope="col" class="number">Items</th>'
        '<th scope="col" class="number">Quantity</th>'
        '<th scope="col" class="number">Unit price, $</th>'
        '<th scope="col" class="number">Share</th>'
        '<th scope="col" class="number">Amount, $</th></tr></thead>'
        f"<tbody>{lines}</tbody><tfoot>"
        f'<tr><th scope="row" colspan="7">Total</th><td>{invoice.total_usd:,}</td></tr>'
        f"{_tax_line(invoice)}"
        f'<tr class="due"><th scope="row" colspan="7">Amount due, US dollars</th>'
        f"<td>{invoice.due_usd:,}</td></tr></tfoot></table></div>"
        f'<section class="rules"><h2>How it was computed</h2><ol>{rules}</ol></section></article>'
    )


def _date_in_words(invoice: Invoice) -> str:
    day = invoice.issued_on
    return f"{day:%B} {day.day}, {day.year}" if invoice.is_final else "not yet"


def _seller_facts(invoice: Invoice) -> str:
    lines = [html.escape(line) for line in invoice.terms.seller.splitlines() if line.strip()]
    return f"<dt>Seller</dt><dd>{'<br>'.join(lines)}</dd>" if lines else ""


def _tax_line(invoice: Invoice) -> str:
    terms = invoice.terms
    if not terms.tax_percent:
        return ""
    name = f"{html.escape(terms.tax_name)}, {terms.tax_percent.normalize():f} %"
    return (
        f'<tr><th scope="row" colspan="7">Rounded to a cent</th><td>{invoice.net_usd:,}</td></tr>'
        f'<tr><th scope="row" colspan="7">{name}</th><td>{invoice.tax_usd:,}</td></tr>'
    )


def _per(line: InvoiceLine) -> str:
    return "per million" if line.price_per == MILLION else f"per {line.unit.removesuffix('s')}"


def _page_line(line: InvoiceLine) -> str:
    price = f"{line.unit_price} {_per(line)}" if line.unit_price else "-"
    version = f" (price&nbsp;{html.escape(line.price_version)})" if line.price_version else ""
    return (
        f"<tr><td>{line.position}</td><td>{html.escape(line.model)}</td><td>{line.kind}</td>"
        f'<td class="number">{line.items:,}</td>'
        f'<td class="number">{line.quantity:,} {line.unit}</td>'
        f'<td class="number price">{price}{version}</td>'
        f'<td class="number">{line.charged_share.normalize():f}</td>'
        f'<td class="number">{line.amount_usd:,}</td></tr>'
    )
