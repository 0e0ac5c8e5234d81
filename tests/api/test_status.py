"""GET /v1/status: how busy the models are, without revealing what other tenants send."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from api.fair_room import Demand
from api.routes.health import STEPS_S
from tests.api.harness import (
    CATALOG,
    IMAGE_MODEL,
    TEXT_MODEL,
    ApiUnderTest,
    running_api,
    settings_for,
)
from tests.keys import bearer, keys_url, stored

pytestmark = pytest.mark.anyio


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    texts_only = stored("texts", "acme", models=(TEXT_MODEL.name,), scopes=("embeddings",))
    url = keys_url(tmp_path, keys=[texts_only], acme="acme", globex="globex")
    async with running_api(settings_for(tmp_path, keys_url=url)) as running:
        yield running


async def status_for(api: ApiUnderTest, key: str) -> dict[str, Any]:
    """The status of each model, by its name."""
    reply = await api.http.get("/v1/status", headers=bearer(key))
    assert reply.status_code == 200
    assert reply.headers["cache-control"] == "no-store"
    return {one["model"]: one for one in reply.json()["data"]}


async def test_idle_models_have_no_wait(api: ApiUnderTest) -> None:
    found = await status_for(api, "acme")
    assert list(found) == [model.name for model in CATALOG.models]
    for one in found.values():
        assert (one["is_busy"], one["your_items_in_flight"], one["expected_wait_s"]) == (
            False,
            0,
            0,
        )
        assert one["items_per_s"] is None, "nothing was measured yet"


async def test_a_tenant_sees_its_own_items_and_only_that_others_have_some(
    api: ApiUnderTest,
) -> None:
    name = IMAGE_MODEL.name
    measured(api, name)
    api.dependencies.admission.admit(Demand(name, 6, "acme"))
    own, foreign = (await status_for(api, "acme"))[name], (await status_for(api, "globex"))[name]
    assert own["your_items_in_flight"] == 6
    assert own["is_busy"]
    assert own["expected_wait_s"] >= foreign["expected_wait_s"] > 0
    # An exact wait time would reveal how much others sent.
    assert {own["expected_wait_s"], foreign["expected_wait_s"]} <= set(STEPS_S)
    assert foreign["is_busy"]
    assert foreign["your_items_in_flight"] == 0
    api.dependencies.admission.admit(Demand(name, 9, "acme"))
    # One fair turn later, the wait is the same, no matter how much the other tenant sends.
    assert (await status_for(api, "globex"))[name] == foreign
    assert not (await status_for(api, "globex"))[TEXT_MODEL.name]["is_busy"]


async def test_a_key_sees_only_its_models(api: ApiUnderTest) -> None:
    assert list(await status_for(api, "texts")) == [TEXT_MODEL.name]
    assert (await api.http.get("/v1/status")).status_code == 401


def measured(api: ApiUnderTest, name: str) -> None:
    """Completes one of a model's items."""
    admission, demand = api.dependencies.admission, Demand(name, 1, "acme")
    admission.admit(demand)
    admission.release(demand, answered=True, took_s=0.01)


async def test_what_was_not_measured_is_not_told(api: ApiUnderTest) -> None:
    """A wait derived from a guess would look the same as a measured one."""
    name = IMAGE_MODEL.name
    api.dependencies.admission.admit(Demand(name, 6, "globex"))
    one = (await status_for(api, "acme"))[name]
    assert (one["is_busy"], one["expected_wait_s"], one["items_per_s"]) == (True, None, None)
    measured(api, name)
    one = (await status_for(api, "acme"))[name]
    assert one["expected_wait_s"] > 0
    assert one["items_per_s"] > 0
