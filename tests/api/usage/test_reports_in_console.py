"""The console's "Reports" and "Usage" views in a browser, for a tenant and an administrator."""

import csv
import io
import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import duckdb
import pytest
from playwright.async_api import Page, expect

from tests.api.usage.test_reports import FOR_TENANTS, traffic
from tests.api.usage.world import World
from tests.browser import needs_chromium, opened_page
from tests.keys import key_for

pytestmark = [pytest.mark.slow, pytest.mark.anyio, needs_chromium]
DOLLARS = re.compile(r"\$[\d,]+\.\d+")


@pytest.fixture
async def page(world: World) -> AsyncIterator[Page]:
    url, viewport = f"{world.apis[0].url}/console#reports", {"width": 360, "height": 740}
    # Chromium logs each error from the API. One is expected.
    async with opened_page(
        url, ignored="status of 400", viewport=viewport, timezone_id="UTC"
    ) as page:
        yield page


async def log_in(page: Page, key: str) -> None:
    await page.get_by_label("API key").fill(key_for(key))
    await page.get_by_role("button", name="Log in").click()


async def go(page: Page, address: str) -> None:
    await page.evaluate(f"location.hash = '#{address}'")


async def fits(page: Page) -> bool:
    return bool(await page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


async def test_a_tenant_reads_its_reports_on_a_phone(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "a")
    await expect(page.locator(".cards").get_by_role("link")).to_have_count(len(FOR_TENANTS))
    for owner in ("Finance", "Product", "Operations"):
        await expect(page.get_by_role("heading", name=owner)).to_be_visible()
    await page.get_by_role("link", name="Usage keys").click()
    await expect(page.get_by_role("heading", name="Usage keys")).to_be_visible()
    table = page.get_by_role("region", name="Usage by API key, model, and day.")
    await expect(table.get_by_role("cell", name="acme").first).to_be_visible()
    await expect(page.get_by_role("cell", name="other", exact=True)).to_have_count(0)
    await expect(page.get_by_role("img", name="Cost by day")).to_be_visible()
    assert await fits(page)


async def test_exported_rows_add_up_to_the_total_of_the_table(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "a")
    await go(page, "reports/usage")
    heads = page.locator(".data thead th")
    await expect(heads.filter(has_text="Cost")).to_be_visible()
    at = (await heads.all_inner_texts()).index("Cost")
    total = await page.locator(".data tfoot tr > *").nth(at).inner_text()
    async with page.expect_download() as saved:
        await page.get_by_role("button", name="Save as CSV").click()
    download = await saved.value
    assert download.suggested_filename == "usage.csv"
    lines = list(csv.DictReader(io.StringIO((await download.path()).read_text())))
    sum_usd = sum(float(line["cost_usd"]) for line in lines)
    assert sum_usd > 0
    async with page.expect_download() as saved:
        await page.get_by_role("button", name="Save as Parquet").click()
    file = await saved.value
    assert file.suggested_filename == "usage.parquet"
    (as_parquet,) = duckdb.execute(
        "SELECT sum(cost_usd) FROM read_parquet(?)", [str(await file.path())]
    ).fetchone() or (None,)
    assert as_parquet == pytest.approx(sum_usd, rel=1e-12)
    assert DOLLARS.fullmatch(total)
    assert float(total[1:]) == pytest.approx(sum_usd, rel=1e-2)


async def test_numbers_are_aligned_and_the_first_column_stays(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "a")
    await go(page, "reports/usage")
    cost = page.locator(".data tbody td.number").first
    await expect(cost).to_have_css("text-align", "right")
    await expect(cost).to_have_text(DOLLARS)
    region = page.locator(".data .scroll")
    first = page.locator(".data tbody th").first
    before = await first.bounding_box()
    await region.evaluate("element => { element.scrollLeft = 400 }")
    after = await first.bounding_box()
    assert before is not None
    assert after is not None
    assert after["x"] == pytest.approx(before["x"], abs=1)


async def test_text_of_plots_has_the_same_size_at_every_width(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "a")
    await go(page, "reports/daily")
    plots = page.locator(".chart svg.drawing")
    await expect(plots).to_have_count(2)
    for width in (360, 800, 1440):
        await page.set_viewport_size({"width": width, "height": 900})
        for number in range(2):
            # The plot is redrawn after its position has changed.
            await page.wait_for_function(
                "number => { const svg = document.querySelectorAll('.chart svg.drawing')[number];"
                " return Math.abs(svg.clientWidth - svg.parentNode.clientWidth) < 2 }",
                arg=number,
            )
            scale = await plots.nth(number).evaluate(
                "svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width"
            )
            assert scale == pytest.approx(1, abs=0.02)
        assert await fits(page)


async def test_a_line_with_one_point_is_a_dot(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "a")
    today = datetime.now(UTC).date().isoformat()
    await go(page, f"reports/daily/{today}..{today}")
    plot = page.get_by_role("img", name="Requests by day")
    await expect(plot.locator("circle")).to_have_count(1)
    box = await plot.locator("circle").bounding_box()
    assert box is not None
    assert box["width"] > 3


@pytest.mark.parametrize("name", ["capacity", "slo", "latency", "data_quality"])
async def test_an_administrator_reads_all(world: World, page: Page, name: str) -> None:
    await traffic(world)
    await log_in(page, "boss")
    await go(page, f"reports/{name}")
    await expect(page.locator(".data").get_by_role("table")).to_be_visible()
    await expect(page.get_by_text("What the columns mean")).to_be_visible()
    await expect(page.get_by_text("All tenants · from")).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollHeight") < 3000


async def test_a_wrong_range_is_explained(world: World, page: Page) -> None:
    await log_in(page, "a")
    await page.get_by_role("link", name="Daily").click()
    await expect(page.get_by_role("img", name="Requests by day")).to_be_visible()
    await page.get_by_label("From").fill("2031-01-01")
    async with page.expect_console_message():
        await page.get_by_role("button", name="Show").click()
    await expect(page.get_by_role("alert")).to_contain_text("must be before the end")
    await page.get_by_role("link", name="This month").click()
    await expect(page.get_by_role("img", name="Requests by day")).to_be_visible()


async def test_a_range_that_is_too_long_leaves_the_choice_of_tenants(
    world: World, page: Page
) -> None:
    await log_in(page, "boss")
    async with page.expect_console_message():
        await go(page, "usage/2020-01-01..2022-01-01/model/acme")
    await expect(page.get_by_role("alert")).to_contain_text("the range must be at most")
    await expect(page.get_by_label("Tenant")).to_have_value("acme")


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (0.4, "0 ms"),
        (999.6, "1.00 s"),
        (9_996, "10.0 s"),
        (59_990, "1 min 0 s"),
        (119_700, "2 min 0 s"),
        (61_000, "1 min 1 s"),
    ],
)
async def test_durations_are_rounded_to_whole_seconds_and_minutes(
    page: Page, ms: float, words: str
) -> None:
    code = """async (ms) => (await import("./console/assets/js/timing.js")).duration(ms)"""
    assert await page.evaluate(code, ms) == words


async def test_plots_and_columns_may_have_very_many_values(page: Page) -> None:
    amount = await page.evaluate(
        """async () => {
            const { chart } = await import("./console/assets/js/chart.js");
            const { aligned } = await import("./console/assets/js/money.js");
            const x = Array.from({ length: 2_000 }, (_, at) => `name ${at}`);
            const one = (_, at) => ({ name: `${at}`, x, y: x.map((_, place) => place) });
            const series = Array.from({ length: 100 }, one);
            chart({ kind: "lines", title: "Many", unit: "", stacked: false, series });
            return aligned(series.flatMap(({ y }) => y))(1234.5);
        }"""
    )
    assert amount == "$1,234.50"


async def test_elements_and_rankings_may_have_very_many_children(page: Page) -> None:
    counts = await page.evaluate(
        """async () => {
            const { h, put } = await import("./console/assets/js/dom.js");
            const { ranking } = await import("./console/assets/js/ranking.js");
            const names = Array.from({ length: 300_000 }, (_, at) => `name ${at}`);
            const element = h("p", {}, names);
            const counts = [element.childNodes.length];
            put(element, names, ["last"]);
            ranking("Many", [{ name: "one", x: names, y: names.map((_, at) => at) }], false, "");
            return [...counts, element.childNodes.length];
        }"""
    )
    assert counts == [300_000, 300_001]


async def test_all_numbers_of_an_administrator_have_the_stated_scope(
    world: World, page: Page
) -> None:
    await traffic(world)
    assert (await world.embed("boss", "four")).status_code == 200
    await world.store_rows(5)
    await log_in(page, "boss")
    await go(page, "usage")
    for tenant, requests in (("house", 1), ("*", 3), ("acme", 1)):
        name = "All tenants" if tenant == "*" else f"Tenant {tenant}"
        await page.get_by_label("Tenant").select_option(tenant)
        await expect(page.locator(".scope")).to_contain_text(f"{name} · ")
        tile = page.locator(".tile", has_text="Requests").locator("b")
        await expect(tile).to_have_text(str(requests))
        spent = await page.locator(".tile", has_text="Cost").locator("b").inner_text()
        cost = page.locator("figure", has=page.get_by_role("heading", name="Cost by day"))
        assert await cost.locator("figcaption b").inner_text() == spent
        assert DOLLARS.fullmatch(spent), "neither an exponent nor nothing"
    await expect(page.get_by_label("Tenant").get_by_role("option", name="other")).to_have_count(1)


async def test_usage_is_split_by_key_and_limited_to_a_range(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "a")
    await go(page, "usage")
    await page.get_by_role("link", name="Key", exact=True).click()
    key_id = key_for("a").split("_")[2][:12]
    table = page.get_by_role("region", name="Usage by key")
    await expect(table.locator("tbody tr")).to_have_count(1)
    await expect(table.locator("tbody th")).to_contain_text(key_id[:4])
    await page.get_by_role("link", name="Last month").click()
    await expect(page.get_by_text("Nothing was used in this range.")).to_be_visible()
    first = datetime.now(UTC).date().replace(day=1) - timedelta(days=1)
    assert time.strftime("%b", first.timetuple()) in await page.locator(".scope").inner_text()
    assert await fits(page)


async def test_a_range_is_kept_from_view_to_view(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "boss")
    await go(page, "usage/30-days/key_id/*")
    await expect(page.get_by_role("region", name="Usage by key")).to_be_visible()
    await go(page, "reports/usage")
    await expect(page.get_by_role("link", name="30 days")).to_have_attribute("aria-current", "true")
    await go(page, "usage")
    await expect(page.locator(".scope")).to_contain_text("All tenants · ")
    await expect(page).to_have_title("Usage – Penstock")
    await expect(page).to_have_url(f"{world.apis[0].url}/console#usage/30-days/model/*")


async def test_report_of_budgets_is_of_this_month(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "boss")
    await go(page, "reports/budgets")
    await expect(page.locator(".data").get_by_role("table")).to_be_visible()
    await expect(page.get_by_text(re.compile(r"from \d{4}-\d{2}-01 00:00 UTC to"))).to_be_visible()


async def test_paging_a_table_keeps_the_focus(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "a")
    await go(page, "reports/daily/90-days")
    following = page.get_by_role("button", name="Next")
    await following.focus()
    for words in ("26–50 of 90", "51–75 of 90"):
        await page.keyboard.press("Enter")
        await expect(page.get_by_text(words)).to_be_visible()
        await expect(following).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("76–90 of 90")).to_be_visible()
    await expect(following).to_be_hidden()
    await expect(page.get_by_role("button", name="Previous")).to_be_focused()


async def test_a_long_table_is_searched_and_opened(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "a")
    await go(page, "reports/daily/90-days")
    rows = page.locator(".data tbody tr")
    await expect(rows).to_have_count(25)
    await page.get_by_role("button", name="Show all").click()
    await expect(rows).to_have_count(90)
    await page.get_by_role("button", name="Show 25").click()
    await expect(rows).to_have_count(25)
    day = await rows.nth(3).locator("th").inner_text()
    search = page.get_by_role("searchbox")
    await search.fill(day)
    await expect(rows).to_have_count(1)
    await expect(rows.locator("th")).to_have_text(day)
    await search.fill("none of them")
    await expect(rows).to_have_count(0)
    await expect(page.get_by_text("No row matches.")).to_be_visible()
    assert await fits(page)


async def test_every_row_is_printed_and_no_control(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "a")
    await go(page, "reports/daily/90-days")
    rows = page.locator(".data tbody tr")
    await expect(rows).to_have_count(25)
    await page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    await page.emulate_media(media="print")
    await expect(rows).to_have_count(90)
    for hidden in (page.get_by_role("button", name="Print"), page.get_by_label("From")):
        await expect(hidden).to_be_hidden()
    await page.emulate_media(media="screen")
    await page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    await expect(rows).to_have_count(25)
