"""The API's handling of a request's priority, queue limit and deadline before it publishes."""

import asyncio

import pytest

from tests.api.harness import TEXT_MODEL, ApiUnderTest

pytestmark = pytest.mark.anyio
TEXTS = {"model": TEXT_MODEL.name, "input": "a cat"}


@pytest.mark.parametrize(
    ("given", "priority"),
    [
        (None, "interactive"),
        ("interactive", "interactive"),
        ("batch", "batch"),
        ("Batch", "batch"),
    ],
)
async def test_priority_is_on_the_job(api: ApiUnderTest, given: str | None, priority: str) -> None:
    headers = {} if given is None else {"x-penstock-lane": given}
    assert (await api.http.post("/v1/embeddings", json=TEXTS, headers=headers)).status_code == 200
    assert [job.envelope.priority for job in api.worker.jobs] == [priority]


async def test_queue_limit_is_on_the_job(api: ApiUnderTest) -> None:
    for headers in ({}, {"x-penstock-queue-limit-ms": "2500"}):
        await api.http.post(
            "/v1/embeddings", json=TEXTS, headers={"cache-control": "no-store"} | headers
        )
    plain, limited = [job.envelope for job in api.worker.jobs]
    assert plain.start_by_s == 0
    assert limited.start_by_s - limited.received_at_s == pytest.approx(2.5)


async def test_unknown_priority_is_refused(api: ApiUnderTest) -> None:
    refused = await api.http.post("/v1/embeddings", json=TEXTS, headers={"x-penstock-lane": "fast"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-penstock-lane")


async def test_late_answers_are_refused_before_they_are_published(api: ApiUnderTest) -> None:
    api.worker.go.clear()
    many = [f"text {number}" for number in range(400)]
    asked = asyncio.create_task(api.http.post("/v1/embeddings", json=TEXTS | {"input": many}))
    await api.worker.until_taken(1)
    one = TEXTS | {"input": "one more"}
    refused = await api.http.post(
        "/v1/embeddings", json=one, headers={"x-penstock-deadline-ms": "200"}
    )
    assert refused.status_code == 429
    assert int(refused.headers["retry-after-ms"]) > 250
    assert "deadline" in refused.json()["error"]["message"]
    patient = asyncio.create_task(api.http.post("/v1/embeddings", json=one))
    api.worker.go.set()
    assert [(await each).status_code for each in (asked, patient)] == [200, 200]
    assert "one more" in [getattr(item.input, "text", "") for item in api.worker.items]
    assert len(api.worker.jobs) == 8  # at most 64 short texts in each


async def test_hits_are_answered_whatever_waits(api: ApiUnderTest) -> None:
    assert (await api.http.post("/v1/embeddings", json=TEXTS)).status_code == 200
    api.worker.go.clear()
    many = [f"text {number}" for number in range(400)]
    asked = asyncio.create_task(api.http.post("/v1/embeddings", json=TEXTS | {"input": many}))
    await api.worker.until_taken(2)
    hit = await api.http.post(
        "/v1/embeddings", json=TEXTS, headers={"x-penstock-deadline-ms": "100"}
    )
    assert (hit.status_code, hit.headers["x-penstock-cache"]) == (200, "hit")
    api.worker.go.set()
    assert (await asked).status_code == 200
