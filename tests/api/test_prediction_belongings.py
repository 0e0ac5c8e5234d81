"""Deleting a prediction removes its files; plans limit how long predictions are kept; webhooks are
listed.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from replicate.client import Client

from shared.broker.transport import WEBHOOKS_TOPIC_ID
from shared.predictions import decode_end
from shared.stores.webhook_log import MAX_KEPT, WebhookAttempt
from shared.tenants.plan import Plan
from tests.api.harness import IMAGE_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.predicting import TEXT, WAIT, until_over
from tests.keys import bearer, key_for, keys_url
from tests.record_stores import RecordStores

pytestmark = pytest.mark.anyio
ACME, OTHER = bearer("a"), bearer("o")
HOOKED = TEXT | {"webhook": "https://receiver.example/hook"}


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    plans = {"team": Plan(prediction_keep_s=3 * 24 * 3600)}
    keys = keys_url(tmp_path, plans=plans, tenants={"acme": "team"}, a="acme", o="other")
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s", keys_url=keys)
    async with running_api(settings) as running:
        running.http.headers.update(ACME)
        yield running


@pytest.fixture
async def client(api: ApiUnderTest) -> AsyncIterator[Any]:
    made = Client(api_token=key_for("a"), base_url=api.url)
    yield made
    await made._async_client.aclose()


async def made(api: ApiUnderTest, body: dict[str, Any] = TEXT) -> str:
    answer = (await api.http.post("/v1/predictions", json=body, headers=WAIT)).json()
    assert answer["status"] == "succeeded"
    found: str = answer["id"]
    return found


async def test_deleted_prediction_is_gone_and_is_not_computed_again(
    api: ApiUnderTest, stores: RecordStores
) -> None:
    name = await made(api, HOOKED)
    await stores.webhook_log.add(
        name, WebhookAttempt(webhook_id="m", event="completed", at_s=1.0, duration_s=0.1)
    )
    path = f"/v1/predictions/{name}"
    assert (await api.http.delete(path, headers=OTHER)).status_code == 404
    answer = await api.http.delete(path)
    assert (answer.status_code, answer.content) == (204, b"")
    for method, below in (("GET", ""), ("DELETE", ""), ("GET", "/webhooks"), ("GET", "/stream")):
        assert (await api.http.request(method, path + below)).status_code == 404
    assert (await api.http.get("/v1/predictions")).json()["results"] == []
    (claim,) = await stores.records.claim([name])
    assert claim is not None
    assert (claim.state, claim.reply) == ("canceled", None), "a late delivery is not computed"
    assert await stores.webhook_log.read(name) == []


@pytest.mark.parametrize(("status", "is_kept"), [(None, True), (500, True), (204, False)])
async def test_end_is_kept_for_a_webhook_that_was_not_told(
    api: ApiUnderTest, stores: RecordStores, status: int | None, is_kept: bool
) -> None:
    name = await made(api, HOOKED)
    if status is not None:
        attempt = WebhookAttempt(
            webhook_id="m", event="completed", at_s=1.0, duration_s=0.1, status=status
        )
        await stores.webhook_log.add(name, attempt)
    assert (await api.http.delete(f"/v1/predictions/{name}")).status_code == 204
    end = await stores.webhook_log.end_of(name)
    assert (end is not None) == is_kept
    if end is not None:
        prediction, record = decode_end(end)
        assert (prediction.id, prediction.webhook) == (name, HOOKED["webhook"])
        assert (prediction.input, record.state) == ({}, "succeeded")
        assert b"a cat" not in end
    for body in (TEXT, HOOKED | {"webhook_events_filter": ["start"]}):
        other = await made(api, body)
        assert (await api.http.delete(f"/v1/predictions/{other}")).status_code == 204
        assert await stores.webhook_log.end_of(other) is None


async def test_results_go_with_it_unless_the_cache_has_them(api: ApiUnderTest) -> None:
    objects = api.dependencies.objects
    api.worker.stores_results_in = objects
    for given, is_kept in (({}, False), ({"seed": 5}, True)):
        body = {"version": IMAGE_MODEL.name, "input": {"prompt": "a", **given}}
        answer = (await api.http.post("/v1/predictions", json=body, headers=WAIT)).json()
        (link,) = answer["output"]
        assert (await api.http.get(link)).status_code == 200
        assert (await api.http.delete(f"/v1/predictions/{answer['id']}")).status_code == 204
        assert ((await api.http.get(link)).status_code == 200) is is_kept


async def test_running_prediction_is_canceled_before_it_is_deleted(api: ApiUnderTest) -> None:
    api.worker.go.clear()
    path = (await api.http.post("/v1/predictions", json=TEXT)).headers["location"]
    await api.worker.claimed.wait()
    refused = await api.http.delete(path)
    assert refused.status_code == 409
    assert "cancel it first" in refused.json()["detail"]
    await api.http.post(f"{path}/cancel")
    assert (await api.http.delete(path)).status_code == 204
    api.worker.go.set()
    assert (await api.http.get(path)).status_code == 404


async def test_deleted_id_is_not_that_of_another_at_once(api: ApiUnderTest) -> None:
    path = "/v1/predictions/mine"
    assert (await api.http.put(path, json=TEXT, headers=WAIT)).status_code == 201
    await api.http.delete(path)
    again = await api.http.put(path, json=TEXT, headers=WAIT)
    assert again.status_code == 422
    assert "recently deleted" in again.text


async def test_predictions_are_kept_as_long_as_the_plan_says(
    api: ApiUnderTest, stores: RecordStores
) -> None:
    ends = {}
    for keyed in (ACME, OTHER):
        created = (await api.http.post("/v1/predictions", json=TEXT, headers=keyed)).json()
        fields = await stores.redis.small_commands.run(
            "HGET", f"penstock:record:{created['id']}", "keep_s"
        )
        ends[keyed["authorization"]] = int(float(fields))
    usual = api.dependencies.settings.prediction_keep_s
    assert list(ends.values()) == [3 * 24 * 3600, usual]


async def test_attempts_of_webhooks_are_told_to_their_tenant_only(
    api: ApiUnderTest, stores: RecordStores
) -> None:
    name = await made(api, HOOKED)
    for status in range(MAX_KEPT + 1):
        await stores.webhook_log.add(
            name,
            WebhookAttempt(
                webhook_id="msg_1", event="completed", at_s=1.5, duration_s=0.25, status=status
            ),
        )
    path = f"/v1/predictions/{name}/webhooks"
    assert (await api.http.get(path, headers=OTHER)).status_code == 404
    found = (await api.http.get(path)).json()["results"]
    assert len(found) == MAX_KEPT
    assert found[-1] == {
        "webhook_id": "msg_1",
        "event": "completed",
        "attempt": MAX_KEPT + 1,
        "created_at": "1970-01-01T00:00:01.500Z",
        "duration_ms": 250.0,
        "status": MAX_KEPT,
        "error": None,
    }


async def test_replay_is_for_ended_predictions_with_a_webhook(api: ApiUnderTest) -> None:
    await api.broker.ensure_topic(WEBHOOKS_TOPIC_ID)
    plain = await made(api)
    assert (await api.http.post(f"/v1/predictions/{plain}/webhooks/replay")).status_code == 422
    api.worker.go.clear()
    created = (await api.http.post("/v1/predictions", json=HOOKED)).json()
    path = f"/v1/predictions/{created['id']}/webhooks/replay"
    assert (await api.http.post(path)).status_code == 409
    assert (await api.http.post(path, headers=OTHER)).status_code == 404
    api.worker.go.set()
    await until_over(api, created)
    assert (await api.http.post(path)).status_code == 202
    again = await api.http.post(path)
    assert (again.status_code, "retry-after" in again.headers) == (429, True)


async def test_files_are_listed_and_deleted_by_either_client(
    api: ApiUnderTest, client: Any
) -> None:
    made = [
        (await api.http.post("/v1/files", files={"content": name.encode()})).json()["id"]
        for name in "ab"
    ]
    assert {file.id for file in await client.files.async_list()} == set(made)
    openai = api.openai(api_key=key_for("a"))
    assert [file async for file in openai.files.list()] == []
    paths = [f"/v1/files/{one}" for one in made]
    assert (await api.http.delete(paths[0], headers=OTHER)).status_code == 404
    assert (await api.http.get("/v1/files", headers=OTHER)).json()["results"] == []
    assert await client.files.async_delete(made[0])
    assert (await api.http.get(paths[0])).status_code == 404
    assert [file.id for file in await client.files.async_list()] == made[1:]
    assert [one["id"] for one in (await api.http.get("/files")).json()["results"]] == made[1:]
