"""GET /v1/invoices and the console's view of invoices: the amounts match the rows and are visible
only to the key.
"""

import re
import time
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest
from playwright.async_api import expect

from shared.reports.definitions import ask_month, find_report
from shared.reports.invoice import InvoiceTerms, invoices
from shared.reports.runner import ReportRunner
from shared.usage.row import Row
from shared.usage.writer import fields_of
from tests.api.usage.test_reports import traffic
from tests.api.usage.world import World, opened_world
from tests.browser import needs_chromium, opened_page
from tests.keys import key_for

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
CENT = Decimal("0.01")


def this_month() -> str:
    return f"{datetime.now(UTC):%Y-%m}"


async def test_a_key_reads_its_own_invoice_and_an_admin_all(world: World) -> None:
    await traffic(world)
    own = (await world.get("/v1/invoices", "a", month=this_month())).json()
    assert [invoice["tenant"] for invoice in own["data"]] == ["acme"]
    everybody = (await world.get("/v1/invoices", "boss", month=this_month())).json()
    assert [invoice["tenant"] for invoice in everybody["data"]] == ["acme", "other"]
    refused = await world.get("/v1/invoices", "a", month=this_month(), tenant="other")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tenant")
    assert (await world.get("/v1/invoices", "narrow", month=this_month())).status_code == 403


async def test_amounts_are_those_of_the_command_and_add_up(world: World) -> None:
    await traffic(world)
    (invoice,) = (await world.get("/v1/invoices", "a", month=this_month())).json()["data"]
    runner = ReportRunner(world.client, world.settings.dataset)
    question = ask_month(this_month(), tenants=("acme",))
    (expected,) = invoices(runner.run(find_report("invoice"), question), InvoiceTerms())
    assert invoice["number"] == expected.number
    amounts = [Decimal(line["amount_usd"]) for line in invoice["lines"]]
    assert amounts == [line.amount_usd for line in expected.lines]
    assert sum(amounts) == Decimal(invoice["total_usd"]) > 0
    cents = Decimal(invoice["total_usd"]).quantize(Decimal("0.01"), ROUND_HALF_UP)
    assert Decimal(invoice["due_usd"]) == cents
    assert invoice["is_final"] is False


@needs_chromium
async def test_seller_and_tax_are_those_of_the_settings(
    redis_url: str, tmp_path: Path, bigquery_endpoint: str
) -> None:
    terms = {
        "invoice_seller": "Mill Ltd\n1 River Road",
        "invoice_tax_name": "VAT",
        "invoice_tax_percent": "19.5",
    }
    async with opened_world(redis_url, tmp_path, bigquery_endpoint, **terms) as world:
        await traffic(world)
        reply = await world.get("/v1/invoices", "a", month=this_month())
        (invoice,) = reply.json()["data"]
        assert invoice["seller"] == terms["invoice_seller"]
        assert invoice["issued_on"] is None
        tax = (Decimal(invoice["net_usd"]) * Decimal("0.195")).quantize(CENT, ROUND_HALF_UP)
        assert invoice["tax"] == {"name": "VAT", "percent": "19.5", "amount_usd": f"{tax}"}
        assert Decimal(invoice["due_usd"]) == Decimal(invoice["net_usd"]) + tax
        url = f"{world.apis[0].url}/console#invoices"
        async with opened_page(url, timezone_id="UTC") as page:
            await page.get_by_label("API key").fill(key_for("a"))
            await page.get_by_role("button", name="Log in").click()
            sheet = page.get_by_role("article", name=f"Invoice {invoice['number']}")
            await expect(sheet.get_by_text("1 River Road")).to_be_visible()
            line = sheet.locator("tfoot tr").filter(has_text="VAT, 19.5 %")
            await expect(line).to_contain_text(f"${tax}")


@needs_chromium
@pytest.mark.parametrize("width", [390, 1440])
async def test_pages_seconds_and_characters_are_lines_with_their_unit(
    world: World, width: int
) -> None:
    prices = {"pages": "0.001", "seconds": "0.0001", "characters": "0.000015"}
    rows = []
    for unit, price_usd in prices.items():
        usd = 1500 * float(price_usd)
        row = Row(
            row_id=f"{unit}:0",
            request_id=unit,
            item=0,
            tenant="acme",
            model=f"reads-{unit}",
            task="custom",
            received_at_s=time.time(),
            status="succeeded",
            cache="miss",
            work=1500,
            work_unit=unit,
            list_price_usd=usd,
            cost_usd=usd,
            charged_share=1.0,
            price_version="1",
        )
        rows.append(fields_of(row))
    place = f"{world.settings.dataset}.rows"
    assert not world.client.insert_rows_json(place, rows, row_ids=[None] * len(rows))
    (invoice,) = (await world.get("/v1/invoices", "a", month=this_month())).json()["data"]
    lines = {line["unit"]: line for line in invoice["lines"]}
    async with opened_page(f"{world.apis[0].url}/console#invoices", timezone_id="UTC") as page:
        await page.set_viewport_size({"width": width, "height": 844})
        await page.get_by_label("API key").fill(key_for("a"))
        await page.get_by_role("button", name="Log in").click()
        sheet = page.get_by_role("article", name=f"Invoice {invoice['number']}")
        for unit, price_usd in prices.items():
            line = lines[unit]
            assert (line["quantity"], line["unit_price_usd"]) == (1500, price_usd)
            assert Decimal(line["amount_usd"]) == 1500 * Decimal(price_usd)
            cells = sheet.get_by_role("row").filter(has_text=f"reads-{unit}")
            await expect(cells).to_contain_text(f"1,500 {unit}")
            await expect(cells).to_contain_text(f"${price_usd} per {unit.removesuffix('s')}")
        lines_of_sheet = page.get_by_role("region", name="Lines")
        assert await lines_of_sheet.evaluate("table => table.scrollWidth <= table.clientWidth")


@pytest.mark.parametrize(
    ("query", "field"),
    [({}, "month"), ({"month": "2026-13"}, "month"), ({"month": "2026-10", "tz": "x"}, "tz")],
)
async def test_wrong_questions_name_their_field(
    world: World, query: dict[str, str], field: str
) -> None:
    response = await world.get("/v1/invoices", "a", **query)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


@needs_chromium
async def test_a_customer_checks_an_invoice_in_the_console(world: World) -> None:
    await traffic(world)
    url = f"{world.apis[0].url}/console#invoices"
    async with opened_page(url, timezone_id="UTC") as page:
        await page.set_viewport_size({"width": 390, "height": 844})
        await page.get_by_label("API key").fill(key_for("boss"))
        await page.get_by_role("button", name="Log in").click()
        row = page.get_by_role("row").filter(has_text="acme")
        number = await row.get_by_role("link").inner_text()
        dues = await page.locator("tbody tr > :last-child").all_inner_texts()
        sum_usd = (
            await page.get_by_role("row").filter(has_text="Total").locator("td").last.inner_text()
        )
        assert len(dues) > 1
        assert sum(Decimal(due.lstrip("$")) for due in dues) == Decimal(sum_usd.lstrip("$"))
        await row.get_by_role("link").click()
        await expect(page).to_have_title(f"Invoice {number} – Penstock")
        sheet = page.get_by_role("article", name=f"Invoice {number}")
        for words in ("acme", "US dollars (USD)", "the month has not ended", "not yet"):
            await expect(sheet.get_by_text(words, exact=words == "acme")).to_be_visible()
        cells = sheet.locator("tbody tr > :last-child")
        await expect(cells.first).to_have_text(re.compile(r"\$\d+\.\d+"))
        amounts = [Decimal(text.lstrip("$")) for text in await cells.all_inner_texts()]
        total = await sheet.locator("tfoot tr").first.locator("td").inner_text()
        assert sum(amounts) == Decimal(total.lstrip("$")) > 0
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.emulate_media(media="print")
        await expect(sheet).to_be_visible()
        await expect(page.get_by_label("Month")).to_be_hidden()
        pdf = await page.pdf()
        assert pdf.startswith(b"%PDF")
