"""Each console view loads little, and only from this API."""

import pytest
from playwright.async_api import Page, Request, expect

from tests.api.usage.test_reports import traffic
from tests.api.usage.world import World
from tests.browser import needs_chromium, opened_page
from tests.keys import key_for

pytestmark = [pytest.mark.slow(about_s=30), pytest.mark.anyio, needs_chromium]
MAX_BYTES = 1_000_000
HEADINGS = {
    "overview": "Overview",
    "try": "Try a model",
    "predictions": "Predictions",
    "batches": "Batches",
    "usage": "Usage",
    "reports": "Reports",
    "reports/daily": "Daily",
    "invoices": "Invoices",
    "live": "Live",
    "keys": "Keys",
    "tenants": "Tenants",
    "plans": "Plans",
    "audit": "Audit log",
}


async def test_each_view_loads_little_and_only_from_this_api(world: World) -> None:
    await traffic(world)
    url = world.apis[0].url
    log_in = f"sessionStorage.setItem('penstock.key', '{key_for('boss')}')"
    for view, heading in HEADINGS.items():
        async with opened_page("about:blank") as page:
            await page.add_init_script(f"if (location.protocol === 'http:') {log_in}")
            total_bytes, hosts = await loaded(page, f"{url}/console#{view}", heading)
        assert hosts == {url}, view
        assert 0 < total_bytes < MAX_BYTES, view


async def loaded(page: Page, address: str, heading: str) -> tuple[int, set[str]]:
    """Returns the size in bytes of all responses until the view is quiet, and the hosts that sent
    them.
    """
    finished: list[Request] = []
    page.on("requestfinished", lambda request: finished.append(request))
    await page.goto(address)
    await expect(page.get_by_role("heading", name=heading, exact=True, level=1)).to_be_attached()
    await page.wait_for_load_state("networkidle")
    sizes = [await request.sizes() for request in finished]
    total = sum(size["responseBodySize"] + size["responseHeadersSize"] for size in sizes)
    return total, {"/".join(request.url.split("/")[:3]) for request in finished}
