"""The console's administrator views in a browser: keys, tenants, plans, and the audit log."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Locator, Page, expect

from shared.stores.key_stores import KeyRedis
from shared.tenants.administration import Administration
from shared.tenants.directory import Document
from shared.tenants.plan import Plan
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.browser import needs_chromium, opened_page
from tests.keys import bearer, key_for, keys_url, stored
from tests.limits import WAIT_LIMIT_S

pytestmark = [pytest.mark.slow(about_s=20), pytest.mark.anyio, needs_chromium]
KEYS = (stored("root", "ops", scopes=("all", "admin")), stored("plain", "acme"))
PLANS = {"team": Plan(budget_usd_per_month=50.0, requests_per_min=600)}
VIEWS = {"keys": "Keys", "tenants": "Tenants", "plans": "Plans", "audit": "Audit log"}
ROOT = bearer("root")
FIT = "lists => lists.every(list => list.scrollWidth <= list.clientWidth)"


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    async with KeyRedis(redis_url, timeout_s=WAIT_LIMIT_S) as store:
        admin = Administration(store, actor="user ann", address="desk")
        await admin.start_directory(Document(keys=KEYS, plans=PLANS))
    async with running_api(
        settings_for(tmp_path, redis_url=redis_url, keys_url=redis_url)
    ) as running:
        yield running


@asynccontextmanager
async def logged_in(api: ApiUnderTest, key: str, **context: Any) -> AsyncIterator[Page]:
    # Chromium logs error responses. There is no BigQuery, so reports return errors.
    url, failure = f"{api.url}/console#live", "Failed to load resource"
    async with opened_page(url, ignored=failure, **context) as page:
        await page.get_by_label("API key").fill(key_for(key))
        await page.get_by_role("button", name="Log in").click()
        await expect(page.get_by_role("heading", name="Live")).to_be_visible()
        yield page


async def go(page: Page, address: str, heading: str) -> None:
    await page.evaluate(f"location.hash = '#{address}'")
    await expect(page.get_by_role("heading", name=heading, exact=True, level=1)).to_be_visible()
    await expect(page.get_by_text("Loading")).to_have_count(0)


def row(page: Page, table: str, text: str) -> Locator:
    return page.get_by_role("region", name=table).get_by_role("row").filter(has_text=text)


async def ask(api: ApiUnderTest, path: str) -> Any:
    return (await api.http.get(f"/v1/admin/{path}", headers=ROOT)).json()


async def test_a_key_is_limited_to_models_and_a_budget(api: ApiUnderTest) -> None:
    async with logged_in(api, "root") as page:
        await go(page, "keys", "Keys")
        form = page.get_by_role("form", name="New key")
        await form.get_by_label("Tenant").fill("acme")
        await form.get_by_label("Name").fill("website")
        await form.get_by_label("Monthly budget").fill("5")
        await form.get_by_label(TEXT_MODEL.name, exact=True).check()
        await form.get_by_role("button", name="Create key").click()
        secret = page.locator("code.secret")
        await expect(secret).to_be_focused()
        await expect(page.get_by_role("button", name="Copy key")).to_be_visible()
        key = (await ask(api, "keys?tenant=acme"))["data"][-1]
        assert (key["models"], key["limits"]["budget_usd_per_month"]) == ([TEXT_MODEL.name], 5)
        created = row(page, "Keys", "website")
        for words in (TEXT_MODEL.name, "$5.00 per month", "not yet"):
            await expect(created).to_contain_text(words)
        page.on("dialog", lambda dialog: dialog.accept())
        await created.get_by_role("button", name="Revoke website").click()
        await expect(created).to_contain_text("revoked")
        await expect(secret).to_have_count(0)
        await expect(page.locator("#main")).to_be_focused()
        await page.get_by_label("Tenant").first.fill("ops")
        await page.get_by_role("button", name="Filter").click()
        await expect(page.get_by_role("region", name="Keys").locator("tbody tr")).to_have_count(1)


async def test_a_new_secret_stays_if_the_keys_can_not_be_listed(api: ApiUnderTest) -> None:
    async with logged_in(api, "root") as page:
        await go(page, "keys", "Keys")
        await page.route("**/v1/admin/keys?*", lambda route: route.abort())
        form = page.get_by_role("form", name="New key")
        await form.get_by_label("Tenant").fill("acme")
        await form.get_by_label("Name").fill("website")
        await form.get_by_role("button", name="Create key").click()
        await expect(page.get_by_role("alert")).to_be_visible()
        await expect(page.locator("code.secret")).to_contain_text("pk_live_")


async def test_a_double_click_creates_one_key(api: ApiUnderTest) -> None:
    async with logged_in(api, "root") as page:
        await go(page, "keys", "Keys")
        form = page.get_by_role("form", name="New key")
        await form.get_by_label("Tenant").fill("acme")
        await form.get_by_label("Name").fill("website")
        methods: list[str] = []
        page.on("request", lambda sent: methods.append(sent.method))
        await form.get_by_role("button", name="Create key").dblclick()
        await expect(page.locator("code.secret")).to_be_focused()
        assert methods.count("POST") == 1


async def test_a_tenant_gets_a_plan_with_a_budget(api: ApiUnderTest) -> None:
    async with logged_in(api, "root") as page:
        await go(page, "plans", "Plans")
        await expect(row(page, "Plans", "team")).to_contain_text("600 requests/min")
        form = page.get_by_role("form", name="New plan")
        await form.get_by_label("Name").fill("small-eu")
        await form.get_by_label("Monthly budget").fill("12.5")
        await form.get_by_label("Storage (MB)").fill("200")
        await form.get_by_role("button", name="Create plan").click()
        await expect(page.get_by_role("status")).to_have_text("The plan small-eu was created.")
        change = page.get_by_role("form", name="Change small-eu")
        await expect(change.get_by_label("Storage (MB)")).to_have_value("200")
        await change.get_by_label("Weight").fill("2")
        await change.get_by_role("button", name="Change plan").click()
        await expect(page.get_by_role("status")).to_have_text("The plan small-eu was changed.")
        await expect(row(page, "Plans", "small-eu")).to_contain_text("weight 2 · 200 MB of files")
        await go(page, "tenants", "Tenants")
        await expect(page.get_by_text("What tenants spent can't be shown")).to_be_visible()
        await page.get_by_label("Plan of acme", exact=True).select_option("small-eu")
        await page.get_by_role("button", name="Set the plan of acme").click()
        await expect(row(page, "Tenants", "acme")).to_contain_text("$12.50")
        await expect(page.get_by_role("status")).to_have_text("The plan of acme was set.")
        await expect(page.get_by_role("button", name="Set the plan of acme")).to_be_focused()
        await go(page, "plans", "Plans")
        page.on("dialog", lambda dialog: dialog.accept())
        await page.get_by_role("button", name="Remove small-eu").click()
        await expect(page.get_by_role("alert")).to_contain_text("is in use: 1 tenant uses it")
        await page.get_by_role("button", name="Remove team").click()
        await expect(page.get_by_role("status")).to_have_text("The plan team was removed.")
        await go(page, "audit", "Audit log")
        log = page.get_by_role("region", name="Audit log").locator("tbody tr")
        await expect(log.first).to_contain_text("Removed plan")
        await expect(log.nth(1)).to_contain_text("none → small-eu")
    plans = {plan["name"]: plan["plan"] for plan in (await ask(api, "plans"))["data"]}
    assert plans["small-eu"]["storage_max_bytes"] == 200_000_000


async def test_a_tenant_is_frozen_and_unfrozen(api: ApiUnderTest) -> None:
    async with logged_in(api, "root") as page:
        page.on("dialog", lambda dialog: dialog.accept())
        await go(page, "tenants", "Tenants")
        tenant = row(page, "Tenants", "acme")
        await page.get_by_role("button", name="Freeze acme", exact=True).click()
        await expect(tenant).to_contain_text("frozen")
        await expect(page.get_by_role("status")).to_contain_text("acme is frozen.")
        thaw = page.get_by_role("button", name="Unfreeze acme")
        await expect(thaw).to_be_focused()
        denied = await api.http.get("/v1/models", headers=bearer("plain"))
        assert (denied.status_code, denied.json()["error"]["code"]) == (403, "tenant_frozen")
        await thaw.click()
        await expect(tenant).to_contain_text("active")
        assert (await api.http.get("/v1/models", headers=bearer("plain"))).status_code == 200
        await page.get_by_role("button", name="Freeze ops", exact=True).click()
        await expect(page.get_by_role("alert")).to_contain_text("this key belongs to that tenant")
        await go(page, "audit", "Audit log")
        log = page.get_by_role("region", name="Audit log").locator("tbody tr")
        await expect(log.first).to_contain_text("Unfroze tenant")
        await expect(log.nth(1)).to_contain_text("Froze tenant")


async def test_a_key_file_is_shown_and_not_changed(tmp_path: Path, redis_url: str) -> None:
    url = keys_url(tmp_path, keys=KEYS, plans=PLANS, tenants={"acme": "team"})
    async with (
        running_api(settings_for(tmp_path, redis_url=redis_url, keys_url=url)) as api,
        logged_in(api, "root") as page,
    ):
        for view, heading in VIEWS.items():
            await go(page, view, heading)
            await expect(page.get_by_text("in a file, which the API only reads")).to_be_visible()
            await expect(page.get_by_text("The last use of keys is not recorded")).to_be_visible()
            filters = page.locator("main button:not(.filters button)")
            await expect(filters).to_have_count(0)
        await go(page, "keys", "Keys")
        await expect(row(page, "Keys", "plain")).to_be_visible()
        await expect(page.get_by_role("columnheader", name="Last used")).to_have_count(0)
        await go(page, "tenants", "Tenants")
        await expect(row(page, "Tenants", "acme")).to_contain_text("$50.00")


async def test_a_key_without_the_scope_gets_the_reason(api: ApiUnderTest) -> None:
    async with logged_in(api, "plain") as page:
        for view, heading in VIEWS.items():
            await go(page, view, heading)
            await expect(page.get_by_text(f"{heading} can't be shown: ")).to_be_visible()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_view_has_serious_barriers(api: ApiUnderTest, width: int, scheme: Any) -> None:
    async with logged_in(api, "root", color_scheme=scheme) as page:
        await page.set_viewport_size({"width": width, "height": 900})
        for view, heading in VIEWS.items():
            await go(page, view, heading)
            violations = (await Axe().run(page)).response["violations"]
            barriers = [rule for rule in violations if rule["impact"] in ("serious", "critical")]
            assert [rule["id"] for rule in barriers] == []
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
            assert await page.locator("main .listing").evaluate_all(FIT), view
