"""Invoices of a month, made from the lines of the report `invoice`.

Rounding: a line's amount is the sum of its rows' cost, rounded half up to a millionth of a dollar.
The total is the sum of the lines as shown. The amount due is the total, rounded half up to a cent,
once. So what is on paper adds up, and differs from the rows by less than half a millionth a line.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from shared.reports.runner import ReportResult

LINE_USD = Decimal("0.000001")
CENT_USD = Decimal("0.01")
CSV_HEADS = (
    *("invoice", "tenant", "month", "position", "model", "unit", "price_version"),
    *("unit_price_usd", "kind", "charged_share", "items", "quantity", "amount_usd"),
    *("invoice_total_usd", "amount_due_usd"),
)


@dataclass(frozen=True)
class InvoiceLine:
    """What was used of one model at one price, and what is charged for it."""

    position: int
    """From 1."""
    model: str
    unit: str
    """tokens or pixel-steps."""
    price_version: str | None
    unit_price_usd: Decimal | None
    """Of a million units. None where rows of an old release were charged nothing."""
    kind: str
    """computed, cached, failed, expired or canceled."""
    charged_share: Decimal
    items: int
    quantity: int
    amount_usd: Decimal


@dataclass(frozen=True)
class Invoice:
    """What one tenant owes for one month."""

    number: str
    tenant: str
    month: date
    tz: str
    """The time zone of the month."""
    lines: Sequence[InvoiceLine]

    @property
    def total_usd(self) -> Decimal:
        """The sum of the lines."""
        return sum((line.amount_usd for line in self.lines), Decimal(0))

    @property
    def due_usd(self) -> Decimal:
        """The total in whole cents."""
        return self.total_usd.quantize(CENT_USD, ROUND_HALF_UP)


def invoices(result: ReportResult) -> list[Invoice]:
    """One invoice per tenant and month, from an answer of the report `invoice`."""
    found: dict[tuple[str, date], list[dict[str, Any]]] = {}
    for record in result.records():
        # Rows without a tenant are of no customer. The report data_quality counts them.
        if record["tenant"]:
            found.setdefault((record["tenant"], record["month"]), []).append(record)
    return [
        Invoice(
            number_of(tenant, month),
            tenant,
            month,
            result.question.tz,
            [_line(at, record) for at, record in enumerate(records, start=1)],
        )
        for (tenant, month), records in sorted(found.items())
    ]


def number_of(tenant: str, month: date) -> str:
    """The number of an invoice: the same whenever it is made, and of no other one."""
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
        kind=record["kind"],
        charged_share=Decimal(repr(record["charged_share"])),
        items=record["items"],
        quantity=record["quantity"],
        amount_usd=Decimal(record["amount_usd"] or 0).quantize(LINE_USD, ROUND_HALF_UP),
    )


def invoices_csv(made: Sequence[Invoice]) -> bytes:
    """CSV with one line for each line of the invoices."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(CSV_HEADS)
    for invoice in made:
        for line in invoice.lines:
            price = line.unit_price_usd
            writer.writerow(
                (
                    *(invoice.number, plain_cell(invoice.tenant), f"{invoice.month:%Y-%m}"),
                    *(line.position, plain_cell(line.model), line.unit, line.price_version),
                    *("" if price is None else f"{price:f}", line.kind, f"{line.charged_share:f}"),
                    *(line.items, line.quantity, line.amount_usd),
                    *(invoice.total_usd, invoice.due_usd),
                )
            )
    return file.getvalue().encode()


_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def plain_cell(text: str) -> str:
    """A cell of CSV that spreadsheets do not take for a formula. Names come from others.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    return f"'{text}" if text.startswith(_FORMULA) else text
