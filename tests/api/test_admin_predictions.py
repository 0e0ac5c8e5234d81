"""Operators read why any tenant's prediction failed, but never its input, output, or logs."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import WAIT
from tests.browser import needs_chromium, opened_page
from tests.keys import bearer, key_for, keys_url, stored

pytestmark = pytest.mark.anyio
SECRET = "the merger is off"
FIELDS = {
    *("id", "request_id", "tenant", "model", "version", "deployment", "endpoint", "api_key_id"),
    *("status", "attempts", "error_code", "metrics", "worker", "device", "object"),
    *("created_at", "started_at", "completed_at", "deadline"),
}


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    root = stored("root", "ops", scopes=("all", "admin"))
    only_admin = stored("only", "ops", scopes=("admin",))
    keys = keys_url(tmp_path, a="acme", u="umbrella", keys=[root, only_admin])
    settings = settings_for(tmp_path, redis_url=redis_url, keys_url=keys)
    async with running_api(settings) as running:
        yield running


async def predict(api: ApiUnderTest, text: str, own_id: str = "") -> dict[str, Any]:
    body = {"version": TEXT_MODEL.name, "input": {"text": text}}
    method, path = ("PUT", f"/{own_id}") if own_id else ("POST", "")
    url, headers = f"/v1/predictions{path}", WAIT | bearer("a")
    made: dict[str, Any] = (await api.http.request(method, url, json=body, headers=headers)).json()
    return made


async def test_an_operator_sees_neither_input_nor_output(api: ApiUnderTest) -> None:
    made = await predict(api, SECRET)
    assert made["status"] == "succeeded"
    for key in ("root", "only"):
        url = f"/v1/admin/predictions/{made['id']}"
        answer = await api.http.get(url, headers=bearer(key))
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found.keys() == FIELDS
        assert SECRET not in answer.text
        assert str(made["output"])[:8] not in answer.text
        assert (found["tenant"], found["status"]) == ("acme", "succeeded")
        assert found["metrics"]["cost_usd"] == made["metrics"]["cost_usd"]
        assert found["completed_at"] == made["completed_at"]


async def test_an_operator_sees_why_it_failed_without_the_message(api: ApiUnderTest) -> None:
    made = await predict(api, "broken")
    assert made["error"]
    url = f"/v1/admin/predictions/{made['id']}"
    answer = await api.http.get(url, headers=bearer("root"))
    found = answer.json()
    assert (found["status"], found["error_code"]) == ("failed", "model_failed")
    assert made["error"] not in answer.text
    assert "broken" not in answer.text


async def test_other_keys_are_forbidden_and_unknown_ids_do_not_exist(api: ApiUnderTest) -> None:
    made = await predict(api, SECRET)
    url = f"/v1/admin/predictions/{made['id']}"
    for key in ("a", "u"):
        assert (await api.http.get(url, headers=bearer(key))).status_code == 403
    assert (await api.http.get(url)).status_code == 401
    for unknown in ("pred_" + "0" * 24, "mine", "conv_" + "0" * 24, "x" * 200):
        url = f"/v1/admin/predictions/{unknown}"
        assert (await api.http.get(url, headers=bearer("root"))).status_code == 404
    own = await predict(api, SECRET, "mine")
    url = f"/v1/predictions/{own['id']}"
    assert (await api.http.get(url, headers=bearer("root"))).status_code == 404


@pytest.mark.slow(about_s=8)
@needs_chromium
async def test_the_console_opens_it_for_an_operator_only(api: ApiUnderTest) -> None:
    made = await predict(api, "broken")
    for key, is_operator in (("root", True), ("u", False)):
        url = f"{api.url}/console#predictions/{made['id']}"
        async with opened_page(url, ignored="Failed to load resource") as page:
            await page.get_by_label("API key").fill(key_for(key))
            await page.get_by_role("button", name="Log in").click()
            note = page.get_by_text("This prediction belongs to tenant acme")
            if is_operator:
                await expect(note).to_be_visible()
                await expect(page.get_by_text("model_failed")).to_be_visible()
                await expect(page.locator("main")).not_to_contain_text("broken")
            else:
                await expect(page.get_by_text("finds only predictions of tenant")).to_be_visible()
                await expect(note).to_have_count(0)
