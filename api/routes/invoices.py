"""GET /v1/invoices: a month's invoices, as created by `penstock invoice`.

A key sees its own tenant's invoice. A key with the `admin` scope sees every tenant's invoices.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.responses import Response

from api.http.call import Call
from api.http.encode_json import encode_json
from api.http.openapi import array_parameter, query_parameter
from api.http.router import Router
from api.routes.reports import NO_STORE, tenants_for
from api.usage.service import ReportService
from shared.reports.definitions import ask_month, find_report
from shared.reports.invoice import RULES, Invoice, InvoiceLine, invoices, terms_of
from shared.settings import ApiSettings


class InvoiceLineReply(msgspec.Struct, kw_only=True):
    """One model's usage at a single price. Amounts are decimal strings, in US dollars."""

    position: int
    """Line number, from 1."""
    model: str
    kind: str
    """computed, cached, failed, expired, or canceled."""
    items: int
    """Number of texts, images, or predictions."""
    quantity: int
    unit: str
    """Unit of `quantity`: tokens, images, seconds, characters, pages, or requests."""
    unit_price_usd: str | None
    """Price of `price_per` units. Null if the rows come from an old release and were not charged
    for.
    """
    price_per: int
    """Number of units that the unit price covers: a million tokens, or 1 of any other unit."""
    price_version: str | None
    charged_share: str
    """The fraction of the price that is charged."""
    amount_usd: str


class InvoiceTaxReply(msgspec.Struct, kw_only=True):
    """The tax on the rounded total."""

    name: str
    percent: str
    amount_usd: str


class InvoiceReply(msgspec.Struct, kw_only=True):
    """One tenant's bill for one month."""

    object: Literal["invoice"] = "invoice"
    number: str
    """Unique; stays the same no matter how often the invoice is recreated."""
    seller: str
    """Name and address, with a line break between lines. Empty if not set."""
    tenant: str
    month: str
    """For example, 2026-10."""
    tz: str
    """Time zone that defines when the month starts and ends."""
    is_final: bool
    """False until the month is over, because charges may still be added."""
    issued_on: str | None
    """Invoice date: the day after the month ends. Null until the month is over."""
    currency: Literal["usd"] = "usd"
    lines: list[InvoiceLineReply]
    total_usd: str
    """Sum of the lines."""
    net_usd: str
    """The total, rounded to cents."""
    tax: InvoiceTaxReply | None
    """Null if no tax is added."""
    due_usd: str
    """The rounded total plus tax."""


class InvoicesReply(msgspec.Struct, kw_only=True):
    """A month's invoices."""

    object: Literal["list"] = "list"
    data: list[InvoiceReply]
    rules: list[str]
    """Rules for computing lines and totals."""


router = Router(scope="usage", prefix="/v1/invoices", tags=["usage"])
_QUESTION = [
    query_parameter("month", "A calendar month.", {"type": "string", "examples": ["2026-10"]}),
    query_parameter("tz", "Time zone of the month.", {"type": "string", "default": "UTC"}),
    array_parameter("tenant", "Only these tenants. Only for keys with the `admin` scope."),
]


@router.get(
    "",
    summary="List the invoices of a month",
    query=_QUESTION,
    reply=InvoicesReply,
    errors=(400, 429),
)
async def list_invoices(call: Call, service: ReportService, settings: ApiSettings) -> Response:
    """Returns a month's invoices, computed from the rows in BigQuery."""
    params = call.http.query_params
    tenants = tenants_for(call, params.getlist("tenant"))
    question = ask_month(params.get("month", ""), params.get("tz", "UTC"), tenants=tenants)
    result = await service.run(find_report("invoice"), question, call.tenant, {})
    data = [_reply(invoice) for invoice in invoices(result, terms_of(settings))]
    return encode_json(InvoicesReply(data=data, rules=list(RULES)), headers=NO_STORE)


def _reply(invoice: Invoice) -> InvoiceReply:
    terms, tax = invoice.terms, None
    if terms.tax_percent:
        percent = f"{terms.tax_percent.normalize():f}"
        tax = InvoiceTaxReply(name=terms.tax_name, percent=percent, amount_usd=f"{invoice.tax_usd}")
    return InvoiceReply(
        number=invoice.number,
        seller=terms.seller,
        tenant=invoice.tenant,
        month=f"{invoice.month:%Y-%m}",
        tz=invoice.tz,
        is_final=invoice.is_final,
        issued_on=f"{invoice.issued_on}" if invoice.is_final else None,
        lines=[_line(line) for line in invoice.lines],
        total_usd=f"{invoice.total_usd}",
        net_usd=f"{invoice.net_usd}",
        tax=tax,
        due_usd=f"{invoice.due_usd}",
    )


def _line(line: InvoiceLine) -> InvoiceLineReply:
    return InvoiceLineReply(
        position=line.position,
        model=line.model,
        kind=line.kind,
        items=line.items,
        quantity=line.quantity,
        unit=line.unit,
        unit_price_usd=line.unit_price or None,
        price_per=line.price_per,
        price_version=line.price_version,
        charged_share=f"{line.charged_share.normalize():f}",
        amount_usd=f"{line.amount_usd}",
    )
