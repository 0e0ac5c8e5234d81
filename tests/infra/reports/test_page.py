"""The pages in a real browser: no errors, nothing loaded from elsewhere, no injected markup."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from google.cloud import bigquery
from playwright.sync_api import Browser, Page, expect, sync_playwright

from infra.reports.formats import as_html
from shared.reports.definitions import ask, find_report, reports
from shared.reports.invoice import Invoice, InvoiceTerms, invoice_page, invoices
from shared.reports.runner import ReportRunner
from tests.infra.reports.conftest import DATASET, load
from tests.infra.reports.test_other_tables import QUESTION, row
from tests.infra.reports.test_reports import ALL
from tests.limits import WAIT_LIMIT_S

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]
MARKER = (
    "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"
)
PHONE, DESKTOP = {"width": 360, "height": 740}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # The sandbox needs permissions that containers lack. Only our own pages are opened.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 360, "height": 740}, offline=True)
    context.set_default_timeout(WAIT_LIMIT_S * 1000)
    expect.set_options(timeout=WAIT_LIMIT_S * 1000)
    page, reported, asked = context.new_page(), [], []
    page.on("pageerror", lambda error: reported.append(str(error)))
    page.on("console", lambda message: reported.append(message.text))
    page.on("request", lambda request: asked.append(request.url))
    yield page
    assert reported == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    context.close()


def opened(page: Page, data: bytes, folder: Path) -> None:
    path = folder / "page.html"
    path.write_bytes(data)
    page.goto(path.as_uri())


def fits(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_page_of_all_reports_has_a_plot_and_a_table_for_each(
    page: Page, runner: ReportRunner, tmp_path: Path
) -> None:
    results = [runner.run(report, ALL) for report in reports().values()]
    opened(page, as_html(results), tmp_path)
    drawn = sum(len(one.report.plots) for one in results if one.rows)
    expect(page.locator("figure .main-svg").first).to_be_visible()
    assert page.locator("figure .plot-container").count() == drawn
    assert page.get_by_role("table").count() == sum(bool(one.rows) for one in results)
    for result in results:
        assert page.locator(f"#{result.report.name} h2").count() == 1
    assert fits(page)
    page.set_viewport_size({"width": 1280, "height": 900})
    assert fits(page)
    assert len(page.pdf(format="A4")) > 10_000


def test_names_of_strangers_are_text(page: Page, empty: bigquery.Client, tmp_path: Path) -> None:
    load(empty, "rows", [row("a", tenant=MARKER, model=MARKER, cost_usd=1.0, tokens=3)])
    runner = ReportRunner(empty, DATASET)
    shown = [runner.run(find_report(name), QUESTION) for name in ("usage", "tenants", "invoice")]
    opened(page, as_html(shown), tmp_path)
    expect(page.locator("figure .main-svg").first).to_be_visible()
    assert page.title() == "Usage reports"
    assert page.locator("img").count() == 0
    opened(page, invoice_page(invoices(shown[2], InvoiceTerms())), tmp_path)
    assert page.title().startswith("Invoice 202610-")
    assert page.locator("img").count() == 0
    expect(page.get_by_text(MARKER).first).to_be_visible()


def test_empty_reports_say_so(page: Page, runner: ReportRunner, tmp_path: Path) -> None:
    nothing = ask("2025-10-01", "2025-10-03")
    opened(page, as_html([runner.run(find_report("usage"), nothing)]), tmp_path)
    expect(page.get_by_text("No rows.")).to_be_visible()
    opened(page, invoice_page([]), tmp_path)
    expect(page.get_by_text("Nothing was used.")).to_be_visible()


def test_an_invoice_has_its_date_once_the_month_has_ended() -> None:
    lasting = Invoice("1", "acme", date(2026, 12, 1), "UTC", [], is_final=False)
    for invoice, words in (
        (lasting, "not yet"),
        (replace(lasting, is_final=True), "January 1, 2027"),
    ):
        assert f"<dt>Issued on</dt><dd>{words}</dd>" in invoice_page([invoice]).decode()


def test_invoices_print_on_sheets_of_their_own(
    page: Page, runner: ReportRunner, tmp_path: Path
) -> None:
    terms = InvoiceTerms("Mill Ltd\n<b>1 River Road</b>", "VAT", Decimal("19.5"))
    made = invoices(runner.run(find_report("invoice"), ALL), terms)
    opened(page, invoice_page(made), tmp_path)
    assert page.get_by_role("article").count() == len(made)
    for sheet, invoice in zip(page.get_by_role("article").all(), made, strict=True):
        assert sheet.get_by_role("heading", level=1).inner_text() == f"Invoice {invoice.number}"
        assert invoice.issued_on == (invoice.month + timedelta(days=31)).replace(day=1)
        assert f"{invoice.due_usd:,}" in sheet.locator(".due").inner_text()
        assert invoice.due_usd == invoice.net_usd + invoice.tax_usd
        assert f"VAT, 19.5 %\t{invoice.tax_usd:,}" in sheet.locator("tfoot").inner_text()
        assert "Mill Ltd\n<b>1 River Road</b>" in sheet.locator("header").inner_text()
        assert sheet.locator("tbody tr").count() == len(invoice.lines)
    assert fits(page)
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 688, "height": 1000})  # A4 without its margins
    assert fits(page)
    for paper in ("A4", "Letter"):
        assert len(page.pdf(format=paper)) > 10_000
