"""Lines and taxes of invoices."""

from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.reports.definitions import ask_month, find_report
from shared.reports.invoice import LINE_USD, Invoice, InvoiceTerms, invoices, invoices_csv, terms_of
from shared.reports.runner import ReportColumn, ReportResult
from shared.settings import InvoiceSettings, read_settings

REPORT = find_report("invoice")
NO_TERMS = InvoiceTerms()
LINE: dict[str, Any] = {
    "tenant": "acme",
    "month": date(2026, 10, 1),
    "model": "draw",
    "unit": "images",
    "price_version": "1",
    "price_per": 1,
    "unit_price_usd": 0.02,
    "kind": "computed",
    "charged_share": 1.0,
    "items": 3,
    "quantity": 3,
    "list_usd": 0.06,
    "amount_usd": 0.06,
}


def invoice_of(terms: InvoiceTerms = NO_TERMS, **changes: Any) -> Invoice:
    columns = [ReportColumn(name, "STRING") for name in REPORT.columns]
    row = tuple((LINE | changes)[column.name] for column in columns)
    (invoice,) = invoices(ReportResult(REPORT, ask_month("2026-10"), columns, [row], 0), terms)
    return invoice


@given(
    per=st.sampled_from([1, 1_000_000]),
    quantity=st.integers(1, 10**11),
    average_usd=st.floats(1e-3, 100),
    share=st.sampled_from([1.0, 0.5, 0.25, 0.1]),
)
def test_quantity_times_unit_price_is_the_amount(
    per: int, quantity: int, average_usd: float, share: float
) -> None:
    quantity = quantity if per > 1 else quantity // 100_000 + 1
    list_usd = quantity * average_usd / per
    price = round(per * list_usd / quantity, 15 if per == 1 else 12)
    amount_usd = round(list_usd * share, 13)
    (line,) = invoice_of(
        price_per=per,
        unit_price_usd=price,
        charged_share=share,
        quantity=quantity,
        amount_usd=amount_usd,
    ).lines
    product = quantity * Decimal(line.unit_price) / per * Decimal(repr(share))
    assert abs(product.quantize(LINE_USD, ROUND_HALF_UP) - line.amount_usd) <= (
        # A double has about 16 digits.
        LINE_USD if abs(product % LINE_USD - LINE_USD / 2) < product * Decimal("1e-14") else 0
    )


def test_a_price_of_the_catalog_is_shown_as_it_is() -> None:
    (line,) = invoice_of(unit_price_usd=0.123456, quantity=1, amount_usd=0.123456).lines
    assert line.unit_price == "0.123456"
    (tokens,) = invoice_of(price_per=10**6, unit_price_usd=0.1, quantity=7, amount_usd=7e-7).lines
    assert (tokens.unit_price, tokens.amount_usd) == ("0.1", Decimal("0.000001"))


def test_an_average_price_has_the_decimals_that_its_amount_needs() -> None:
    usd = 1_000_000 / 3
    (line,) = invoice_of(
        unit_price_usd=round(usd / 3_000_000, 15), quantity=3_000_000, amount_usd=usd
    ).lines
    assert line.unit_price == "0.111111111111"
    assert (3_000_000 * Decimal(line.unit_price)).quantize(LINE_USD) == line.amount_usd


@pytest.mark.parametrize("usd", [0.0000025, 0.0000005, 1.0000015, 0.0000335])
def test_half_a_millionth_is_rounded_up(usd: float) -> None:
    (line,) = invoice_of(amount_usd=usd).lines
    assert line.amount_usd == Decimal(repr(usd)).quantize(LINE_USD, ROUND_HALF_UP)


def test_a_tax_of_minus_zero_is_none() -> None:
    terms = terms_of(read_settings(InvoiceSettings, invoice_tax_percent="-0"))
    invoice = invoice_of(terms)
    assert f"{invoice.tax_usd} {invoice.due_usd}" == "0.00 0.06"
    assert b"-0" not in invoices_csv([invoice])
