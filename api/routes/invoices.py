"""GET /v1/invoices: the invoices of a month, as `penstock invoice` creates them.

A key sees its own tenant's invoice. A key with the `admin` scope sees all tenants.
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
from shared.money.amounts import plain
from shared.reports.definitions import ask_month, find_report
from shared.reports.invoice import RULES, Invoice, InvoiceLine, invoices, terms_of
from shared.settings import ApiSettings


class InvoiceLineReply(msgspec.Struct, kw_only=True):
    """The use of one model at one price. Amounts are decimals in text, in US dollars."""

    position: int
    """Line number, from 1."""
    model: str
    kind: str
    """computed, cached, failed, expired or canceled."""
    items: int
    """Texts, images or predictions."""
    quantity: int
    unit: str
    """Unit of `quantity`: tokens, pixel-steps or items."""
    unit_price_usd: str | None
    """Price of a million units. Null if rows of an old release were not charged."""
    price_version: str | None
    charged_share: str
    """Fraction of the price that is charged."""
    amount_usd: str


class InvoiceTaxReply(msgspec.Struct, kw_only=True):
    """The tax on the rounded total."""

    name: str
    percent: str
    amount_usd: str


class InvoiceReply(msgspec.Struct, kw_only=True):
    """The amount that one tenant owes for one month."""

    object: Literal["invoice"] = "invoice"
    number: str
    """Unique, and the same whenever the invoice is created again."""
    seller: str
    """Name and address in lines. Empty: not set."""
    tenant: str
    month: str
    """Such as 2026-10."""
    tz: str
    """Time zone of the month."""
    is_final: bool
    """False while the month lasts: more may be added."""
    issued_on: str | None
    """Date of the invoice: the day after the month. Null while the month lasts."""
    currency: Literal["usd"] = "usd"
    lines: list[InvoiceLineReply]
    total_usd: str
    """Sum of the lines."""
    net_usd: str
    """The total, rounded to cents."""
    tax: InvoiceTaxReply | None
    """Null: no tax is added."""
    due_usd: str
    """The rounded total and the tax."""


class InvoicesReply(msgspec.Struct, kw_only=True):
    """The invoices of a month."""

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
    """Returns the invoices of a month, computed from the rows in BigQuery."""
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
    price = line.unit_price_usd
    return InvoiceLineReply(
        position=line.position,
        model=line.model,
        kind=line.kind,
        items=line.items,
        quantity=line.quantity,
        unit=line.unit,
        unit_price_usd=None if price is None else plain(price),
        price_version=line.price_version,
        charged_share=f"{line.charged_share.normalize():f}",
        amount_usd=f"{line.amount_usd}",
    )
