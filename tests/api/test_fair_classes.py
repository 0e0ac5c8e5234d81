"""A tenant's long custom-class items delay other tenants no longer than documented."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shared.tenants.plan import Plan
from tests.api.harness import ApiUnderTest
from tests.api.predicting import WAIT
from tests.api.serving_classes import served_class
from tests.api.test_limits import limits_in
from tests.api.test_wasted_work import until_settled
from tests.keys import bearer, keys_url, stored
from tests.limits import WAIT_LIMIT_S

pytestmark = [pytest.mark.anyio, pytest.mark.slow(about_s=30)]
WAITS = """
class Predictor(BasePredictor):
    def predict(self, is_long: bool = False) -> str:
        while is_long:
            time.sleep(0.01)
        return "done"
"""


def keys_of(tmp_path: Path, plan: Plan) -> dict[str, object]:
    url = keys_url(
        tmp_path,
        plans={"theirs": plan},
        tenants={"acme": "theirs", "globex": "theirs"},
        keys=[stored("busy", "acme"), stored("quiet", "globex")],
    )
    return {"keys_url": url}


async def create(api: ApiUnderTest, key: str, *, waits: bool = False, **given: Any) -> Any:
    body = {"version": "mine", "input": given}
    headers = bearer(key) | (WAIT if waits else {})
    response = await api.http.post("/v1/predictions", json=body, headers=headers)
    assert response.status_code == 201, response.text
    return response.json()


async def status_of(api: ApiUnderTest, key: str, prediction: Any) -> Any:
    path = f"/v1/predictions/{prediction['id']}"
    return (await api.http.get(path, headers=bearer(key))).json()


@pytest.mark.parametrize("priority", ["interactive", "batch"])
async def test_a_tenant_does_not_hold_all_processes(
    tmp_path: Path, redis_url: str, priority: str
) -> None:
    """Five endless items leave one of two processes free for another tenant."""
    plan = Plan(max_priority="batch") if priority == "batch" else Plan()
    settings = keys_of(tmp_path, plan)
    serving = served_class(tmp_path, redis_url, WAITS, settings, processes=2)
    async with serving as api, asyncio.timeout(WAIT_LIMIT_S):
        assert (await create(api, "quiet", waits=True))["status"] == "succeeded"
        held = [await create(api, "busy", is_long=True) for _ in range(5)]
        while (await status_of(api, "busy", held[0]))["status"] != "processing":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        for _ in range(3):
            assert (await create(api, "quiet", waits=True))["status"] == "succeeded"
        for one in held:
            path = f"/v1/predictions/{one['id']}/cancel"
            await api.http.post(path, headers=bearer("busy"))
        assert (await create(api, "busy", waits=True))["status"] == "succeeded"


async def test_an_item_ends_at_the_longest_time_of_its_entry(
    tmp_path: Path, redis_url: str
) -> None:
    """The item fails permanently and costs nothing, but its work still counts toward the limits.

    The next item runs.
    """
    settings = keys_of(tmp_path, Plan(requests_per_min=100, work_per_min=100))
    entry: dict[str, Any] = {"work": {"max_s": 8.0}}
    serving = served_class(tmp_path, redis_url, WAITS, settings, **entry)
    async with serving as api, asyncio.timeout(WAIT_LIMIT_S):
        failed = await create(api, "busy", waits=True, is_long=True)
        assert failed["status"] == "failed"
        assert "took the model longer than the maximum of 8 s" in failed["error"]
        assert failed["metrics"]["cost_usd"] == 0
        await until_settled(api)
        body = {"version": "mine", "input": {}}
        headers = bearer("busy") | WAIT
        answer = await api.http.post("/v1/predictions", json=body, headers=headers)
        assert answer.json()["status"] == "succeeded"
        assert limits_in(answer)["remaining-work"] == "98"
