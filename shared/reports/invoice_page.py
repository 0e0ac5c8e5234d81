"""An invoice as a page to print: A4 or Letter, with the rules by which it was made."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import resources

from shared.reports.invoice import Invoice, InvoiceLine

RULES = (
    "An item that was computed and delivered costs its price. A result from the cache, or of the"
    " same item of another request, costs the share of the price that the model's entry states.",
    "Items that failed, came too late or were canceled cost nothing, but a text that was canceled"
    " or came too late after its reader got tokens of it costs these and its prompt. Requests that"
    " were refused are not on the invoice.",
    "Tokens that were read, written and found in the cache have prices of their own. The unit price"
    " of a line of texts is their average.",
    "Lines of batches cost the share of the price that the plan states.",
    "A price holds for what is received from its first moment on. A month with two prices has"
    " lines of both.",
    "A line is quantity x unit price x share: the sum of its items, rounded half up to a millionth"
    " of a dollar. The total is the sum of the lines. The amount due is the total, rounded half up"
    " to a cent.",
)


def invoice_page(made: Sequence[Invoice]) -> bytes:
    """The page of one invoice, or of several, each on a sheet of its own."""
    style = resources.files("shared.reports").joinpath("invoice.css").read_text(encoding="utf-8")
    title = f"Invoice {made[0].number}" if len(made) == 1 else "Invoices"
    sheets = "".join(_sheet(invoice) for invoice in made) or "<p>Nothing was used.</p>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{sheets}</main></body></html>\n"
    ).encode()


def _sheet(invoice: Invoice) -> str:
    lines = "".join(_line(line) for line in invoice.lines)
    rules = "".join(f"<li>{html.escape(rule)}</li>" for rule in RULES)
    return (
        f'<article id="{invoice.number}"><header><h1>Invoice {invoice.number}</h1><dl>'
        f"<dt>Customer</dt><dd>{html.escape(invoice.tenant)}</dd>"
        f"<dt>Month</dt><dd>{invoice.month:%B %Y} ({html.escape(invoice.tz)})</dd>"
        f"<dt>Amount due</dt><dd><b>${invoice.due_usd:,}</b></dd></dl></header>"
        '<div class="table" tabindex="0" role="region" aria-label="Lines"><table>'
        '<thead><tr><th scope="col">No.</th><th scope="col">Model</th>'
        '<th scope="col">What</th><th scope="col" class="number">Items</th>'
        '<th scope="col" class="number">Quantity</th>'
        '<th scope="col" class="number">$ per million</th>'
        '<th scope="col" class="number">Share</th>'
        '<th scope="col" class="number">Amount, $</th></tr></thead>'
        f"<tbody>{lines}</tbody><tfoot>"
        f'<tr><th scope="row" colspan="7">Total</th><td>{invoice.total_usd:,}</td></tr>'
        f'<tr class="due"><th scope="row" colspan="7">Amount due, US dollars</th>'
        f"<td>{invoice.due_usd:,}</td></tr></tfoot></table></div>"
        f'<section class="rules"><h2>How it was computed</h2><ol>{rules}</ol></section></article>'
    )


def _line(line: InvoiceLine) -> str:
    price = "-" if line.unit_price_usd is None else f"{line.unit_price_usd.normalize():f}"
    version = f" (price {html.escape(line.price_version)})" if line.price_version else ""
    cells = (
        f"{line.items:,}",
        f"{line.quantity:,} {line.unit}",
        f"{price}{version}",
        f"{line.charged_share.normalize():f}",
        f"{line.amount_usd:,}",
    )
    numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
    return (
        f"<tr><td>{line.position}</td><td>{html.escape(line.model)}</td>"
        f"<td>{line.kind}</td>{numbers}</tr>"
    )
