"""The Predictions API with a real Redis, over plain HTTP: create, wait, list, cancel, follow."""

import asyncio
import itertools
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from shared.models.tasks.embedding import TextInput
from tests.api.fake_worker import MAX_PROMPT_WORDS, vector_of
from tests.api.harness import (
    IMAGE_MODEL,
    TEXT_MODEL,
    ApiUnderTest,
    api_with_redis,
    running_api,
    settings_for,
)
from tests.api.predicting import TEXT, WAIT, admitted, until_over
from tests.keys import bearer, keys_url
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores

pytestmark = pytest.mark.anyio


api = api_with_redis(secret="s")


async def test_prediction_is_answered_at_once_and_found_when_it_is_over(api: ApiUnderTest) -> None:
    api.worker.go.clear()
    response = await api.http.post("/v1/predictions", json=TEXT)
    created = response.json()
    assert response.status_code == 201
    assert (created["status"], created["output"], created["error"]) == ("starting", None, None)
    assert created["input"] == TEXT["input"]
    assert (
        created["urls"]["get"]
        == response.headers["location"]
        == f"{api.url}/v1/predictions/{created['id']}"
    )
    assert admitted() == 0
    api.worker.go.set()
    found = await until_over(api, created)
    assert found["status"] == "succeeded"
    assert found["output"] == pytest.approx(vector_of(TextInput("a cat")).tolist())
    assert found["metrics"]["predict_time"] == 0.0025
    assert found["created_at"] < found["started_at"] < found["completed_at"] < found["deadline"]
    (job,) = api.worker.jobs
    assert (job.envelope.prediction, job.envelope.request_id, job.envelope.inbox) == (
        "1",
        created["id"],
        "",
    )
    assert job.envelope.deadline_s - job.envelope.received_at_s == pytest.approx(
        TEXT_MODEL.deadline.longest_s
    )


async def test_queue_limit_is_on_the_job(api: ApiUnderTest) -> None:
    await api.http.post(
        "/v1/predictions", json=TEXT, headers=WAIT | {"x-penstock-queue-limit-ms": "2500"}
    )
    (envelope,) = [job.envelope for job in api.worker.jobs]
    assert envelope.start_by_s - envelope.received_at_s == pytest.approx(2.5)


async def test_waiting_answers_when_it_is_over(api: ApiUnderTest) -> None:
    response = await api.http.post("/v1/predictions", json=TEXT, headers=WAIT)
    assert (response.status_code, response.json()["status"]) == (201, "succeeded")
    assert admitted() == 0


async def test_wait_that_ends_early_answers_starting_and_get_says_processing(
    api: ApiUnderTest,
) -> None:
    """If a wait returns `processing`, Replicate's clients treat the prediction as finished, without
    output.
    """
    api.worker.go.clear()
    response = await api.http.post("/v1/predictions", json=TEXT, headers={"prefer": "wait=1"})
    created = response.json()
    assert created["status"] == "starting"
    assert (await api.http.get(f"/v1/predictions/{created['id']}")).json()["status"] == "processing"
    api.worker.go.set()
    assert (await until_over(api, created))["status"] == "succeeded"


async def test_what_a_prompt_lost_is_told(api: ApiUnderTest) -> None:
    path, prompt = (
        f"/v1/models/any/{IMAGE_MODEL.name}/predictions",
        "red " * (MAX_PROMPT_WORDS + 4),
    )
    for given, left_out in ((prompt, 4), ("red", 0)):
        body = {"input": {"prompt": given, "num_outputs": 2}}
        assert (await api.http.post(path, json=body, headers=WAIT)).json()["metrics"][
            "truncated_tokens"
        ] == left_out
    assert (
        "truncated_tokens"
        not in (await api.http.post("/v1/predictions", json=TEXT, headers=WAIT)).json()["metrics"]
    )


async def test_failure_says_why(api: ApiUnderTest) -> None:
    body = TEXT | {"input": {"text": "broken"}}
    found = (await api.http.post("/v1/predictions", json=body, headers=WAIT)).json()
    assert (found["status"], found["output"]) == ("failed", None)
    assert found["error"] == "this input breaks the model"


async def test_canceled_stays_canceled(api: ApiUnderTest) -> None:
    api.worker.go.clear()
    created = (await api.http.post("/v1/predictions", json=TEXT)).json()
    await api.worker.claimed.wait()
    first = await api.http.post(f"/v1/predictions/{created['id']}/cancel")
    assert (first.status_code, first.json()["status"]) == (200, "canceled"), first.text
    api.worker.go.set()
    again = await api.http.post(f"/v1/predictions/{created['id']}/cancel")
    assert (again.status_code, again.json()["status"], again.json()["output"]) == (
        200,
        "canceled",
        None,
    )
    assert (await api.http.get(f"/v1/predictions/{created['id']}")).json()["completed_at"]


async def test_put_twice_is_one_prediction(api: ApiUnderTest) -> None:
    first, second = await asyncio.gather(
        *(api.http.put("/v1/predictions/mine.1", json=TEXT, headers=WAIT) for _ in range(2))
    )
    assert {first.status_code, second.status_code} == {200, 201}
    assert first.json()["id"] == second.json()["id"] == "mine.1"
    assert first.json()["output"] == second.json()["output"] is not None
    assert len(api.worker.jobs) == 1
    other = await api.http.put("/v1/predictions/mine.1", json=TEXT | {"input": {"text": "a dog"}})
    assert other.status_code == 422
    assert other.json()["invalid_fields"][0]["field"] == "id"
    assert (await api.http.get("/v1/predictions/mine.1")).json()["output"] == first.json()["output"]


@pytest.fixture
def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits streams to one at a time, starting before the API does."""
    monkeypatch.setattr("api.predictions.event_stream.MAX_STREAMS", 1)


async def test_streams_are_bounded_and_end_with_their_readers(
    one_stream: None, api: ApiUnderTest
) -> None:
    api.worker.go.clear()
    created = (await api.http.post("/v1/predictions", json=TEXT)).json()
    async with RecordStores(str(api.dependencies.settings.redis_url)) as stores:
        await api.worker.claimed.wait()
        await stores.records.progress(created["id"], 1, 2)
    url = created["urls"]["stream"]
    async with api.http.stream("GET", url) as following:
        # Otherwise, the reader would be garbage-collected, which would close its stream.
        lines = following.aiter_lines()
        assert await anext(lines) == "event: logs"
        assert (await api.http.get(url)).status_code == 429
    api.worker.go.set()
    resumed = {"last-event-id": "3.0"}
    async with asyncio.timeout(WAIT_LIMIT_S):
        while (response := await api.http.get(url, headers=resumed)).status_code == 429:
            pass
    assert (response.status_code, response.text) == (200, "")


async def test_streams_that_open_together_do_not_pass_the_bound(
    one_stream: None, api: ApiUnderTest
) -> None:
    api.worker.go.clear()
    created = (await api.http.post("/v1/predictions", json=TEXT)).json()
    url = created["urls"]["stream"]
    streams = [asyncio.create_task(api.http.get(url)) for _ in range(8)]
    refused = [await one for one in itertools.islice(asyncio.as_completed(streams), 7)]
    assert [one.status_code for one in refused] == [429] * 7
    api.worker.go.set()
    assert sorted([(await one).status_code for one in streams]) == [200] + [429] * 7


async def test_streams_of_one_tenant_leave_room_for_another(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.predictions.event_stream.MAX_STREAMS", 4)
    async with (
        running_api(
            settings_for(
                tmp_path, redis_url=redis_url, keys_url=keys_url(tmp_path, a="acme", u="umbrella")
            )
        ) as api,
        AsyncExitStack() as stack,
    ):
        acme, umbrella = (bearer(key) for key in "au")
        api.worker.go.clear()
        created = (await api.http.post("/v1/predictions", json=TEXT, headers=acme)).json()
        await api.worker.claimed.wait()
        async with RecordStores(redis_url) as stores:
            await stores.records.progress(created["id"], 1, 2)
        url = created["urls"]["stream"]
        followed = []
        for _ in range(4):
            following = await stack.enter_async_context(api.http.stream("GET", url, headers=acme))
            followed.append(
                following.aiter_lines()
            )  # otherwise, the reader would be garbage-collected, which would close its stream
            assert await anext(followed[-1]) == "event: logs"
        assert (await api.http.head(url, headers=acme)).status_code == 429
        theirs = (await api.http.post("/v1/predictions", json=TEXT, headers=umbrella)).json()
        assert (await api.http.head(theirs["urls"]["stream"], headers=umbrella)).status_code == 200


async def test_many_predictions_of_one_tenant_do_not_stand_before_requests(
    api: ApiUnderTest,
) -> None:
    """The `interactive` priority gets as many as a model process takes at once, and `batch` gets
    the rest.
    """
    api.worker.go.clear()
    most = 2 * IMAGE_MODEL.batch.max_items
    for number in range(most + 3):
        body = {"version": IMAGE_MODEL.name, "input": {"prompt": f"number {number}"}}
        created = await api.http.post("/v1/predictions", json=body)
        assert created.status_code == 201
    await api.worker.until_taken(most + 3)
    assert [job.envelope.priority for job in api.worker.jobs] == ["interactive"] * most + [
        "batch"
    ] * 3
    api.worker.go.set()
    for prediction in (await api.http.get("/v1/predictions")).json()["results"]:
        await until_over(api, prediction)
    await api.http.post("/v1/predictions", json=TEXT, headers=WAIT)
    assert api.worker.jobs[-1].envelope.priority == "interactive"


async def test_idempotency_key_makes_one_of_two(api: ApiUnderTest) -> None:
    headers = {"idempotency-key": "k-1"}
    one, two = [
        await api.http.post("/v1/predictions", json=TEXT, headers=headers) for _ in range(2)
    ]
    assert one.json()["id"] == two.json()["id"]
    assert [answer.headers.get("idempotent-replayed") for answer in (one, two)] == [None, "true"]
    other = await api.http.post(
        "/v1/predictions", json=TEXT | {"webhook": "https://a.example/"}, headers=headers
    )
    assert other.status_code == 422
    assert len(api.worker.jobs) == 1


@pytest.mark.parametrize(
    ("given", "seconds"), [("45s", 45), ("2m", 120), ("1h30m", 300), ("90", 90)]
)
async def test_cancel_after_is_the_deadline(api: ApiUnderTest, given: str, seconds: int) -> None:
    await api.http.post("/v1/predictions", json=TEXT, headers=WAIT | {"cancel-after": given})
    envelope = api.worker.jobs[0].envelope
    assert envelope.deadline_s - envelope.received_at_s == pytest.approx(seconds)


async def test_list_goes_back_page_by_page(api: ApiUnderTest) -> None:
    made = [(await api.http.post("/v1/predictions", json=TEXT)).json()["id"] for _ in range(23)]
    first = (await api.http.get("/v1/predictions")).json()
    second = (await api.http.get(first["next"])).json()
    assert [one["id"] for one in first["results"] + second["results"]] == made[::-1]
    assert second["next"] is None


async def test_a_page_of_large_predictions_has_fewer_of_them(api: ApiUnderTest) -> None:
    """If several callers listed them at the same time, they could exceed an instance's memory."""
    large = TEXT | {"input": {"texts": ["a " * 3500] * 128}}
    made = [(await api.http.post("/v1/predictions", json=large)).json()["id"] for _ in range(8)]
    found, url = list[str](), "/v1/predictions"
    while url:
        page = await api.http.get(url)
        assert len(page.content) < 8 * 1024 * 1024
        found += [one["id"] for one in page.json()["results"]]
        url = page.json()["next"]
    assert found == made[::-1]


async def test_tenants_see_their_own_only(tmp_path: Path, redis_url: str) -> None:
    settings = settings_for(
        tmp_path, redis_url=redis_url, keys_url=keys_url(tmp_path, a="acme", u="umbrella")
    )
    async with running_api(settings) as api:
        acme, umbrella = (bearer(key) for key in "au")
        theirs = (await api.http.put("/v1/predictions/mine", json=TEXT, headers=acme)).json()
        ours = (await api.http.post("/v1/predictions", json=TEXT, headers=acme)).json()
        file = (await api.http.post("/v1/files", files={"content": b"x"}, headers=acme)).json()
        paths = [
            f"/v1/predictions/{theirs['id']}",
            f"/v1/predictions/{ours['id']}",
            f"/v1/files/{file['id']}",
        ]
        unknown = await api.http.get(
            "/v1/predictions/pred_000000000000000000000000", headers=umbrella
        )
        for path in paths:
            assert (await api.http.get(path, headers=acme)).status_code == 200
            response = await api.http.get(path, headers=umbrella)
            assert (response.status_code, response.json()["title"]) == (
                404,
                unknown.json()["title"],
            )
        cancel = await api.http.post(f"/v1/predictions/{ours['id']}/cancel", headers=umbrella)
        assert cancel.status_code == 404
        assert (await api.http.get("/v1/predictions", headers=umbrella)).json()["results"] == []
        same_id = await api.http.put(
            "/v1/predictions/mine", json=TEXT | {"input": {"text": "b"}}, headers=umbrella
        )
        assert same_id.status_code == 201
        refused = await api.http.get(paths[0])
        assert (refused.status_code, refused.json()["title"]) == (401, "Unauthenticated")


async def test_progress_shows_in_logs(api: ApiUnderTest, redis_url: str) -> None:
    api.worker.go.clear()
    body = {"version": IMAGE_MODEL.name, "input": {"prompt": "a"}}
    created = (await api.http.post("/v1/predictions", json=body)).json()
    await api.worker.claimed.wait()
    async with RecordStores(redis_url) as stores:
        await stores.records.progress(created["id"], 3, 10)
    found = (await api.http.get(f"/v1/predictions/{created['id']}")).json()
    assert found["logs"] == " 30%|███       | 3/10\n"
    api.worker.go.set()
    assert (await until_over(api, created))["logs"].startswith("100%|██████████| 10/10")
