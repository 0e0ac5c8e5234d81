"""A batch's results, through OpenAI's client, with a runner in the same process."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable

import numpy as np
import openai
import pytest

from api.batches import service
from shared.models.tasks.embedding import TextInput
from tests.api.batches.batching import (
    Running,
    answers,
    created,
    jsonl,
    line,
    until,
    until_completed,
)
from tests.api.fake_worker import vector_of
from tests.api.harness import IMAGE_MODEL, TEXT_MODEL, ApiUnderTest

pytestmark = pytest.mark.anyio


@pytest.mark.usefixtures("small_segments")
async def test_every_line_is_answered_once_and_in_order(api: ApiUnderTest) -> None:
    client = api.openai()
    batch = await created(
        client, jsonl(line(str(n)) for n in range(50)), metadata={"night": "monday"}
    )
    assert (batch.status, batch.metadata) == ("validating", {"night": "monday"})
    assert batch.expires_at - batch.created_at == 24 * 3600
    done = await until(client, batch)
    assert done.status == "completed", done
    assert done.request_counts.model_dump() == {"completed": 50, "failed": 0, "total": 50}
    assert (done.model, done.error_file_id, done.errors) == (TEXT_MODEL.name, None, None)
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert done.usage.total_tokens == done.usage.input_tokens == 50 * 4
    found = await answers(client, done.output_file_id)
    assert [one["custom_id"] for one in found] == [str(n) for n in range(50)]
    for one in found:
        response = one["response"]
        assert (one["error"], response["status_code"]) == (None, 200)
        vector = response["body"]["data"][0]["embedding"]
        assert np.allclose(vector, vector_of(TextInput(f"text {one['custom_id']}")), atol=1e-6)
    output = await client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert len({one["id"] for one in found}) == 50


async def test_errors_of_lines_are_in_the_error_file(api: ApiUnderTest) -> None:
    client = api.openai()
    texts = ["fine", "broken", "fine too", "broken"]
    batch = await created(client, jsonl(line(f"c{n}", text) for n, text in enumerate(texts)))
    done = await until(client, batch)
    assert done.status == "completed"
    assert done.request_counts.model_dump() == {"completed": 2, "failed": 2, "total": 4}
    assert [one["custom_id"] for one in await answers(client, done.output_file_id)] == ["c0", "c2"]
    errors = await answers(client, done.error_file_id)
    assert [one["custom_id"] for one in errors] == ["c1", "c3"]
    assert errors[0]["response"]["status_code"] == 500
    assert errors[0]["response"]["body"]["error"]["code"] == "model_failed"


async def test_batch_whose_lines_all_fail_has_no_output_file(api: ApiUnderTest) -> None:
    client = api.openai()
    done = await until(client, await created(client, jsonl([line("1", "broken")])))
    assert (done.status, done.output_file_id) == ("completed", None)
    assert len(await answers(client, done.error_file_id)) == 1


async def test_rows_are_of_the_priority_and_cost_the_plans_share(
    both: tuple[ApiUnderTest, Running],
) -> None:
    api, _ = both
    client = api.openai()
    batch = await created(client, jsonl(line(str(n)) for n in range(3)))
    await until(client, batch)
    envelopes = [job.envelope for job in api.worker.jobs]
    assert {one.batch_id for one in envelopes} == {batch.id}
    assert {(one.priority, one.price_share) for one in envelopes} == {("batch", 0.5)}
    assert len({one.request_id for one in envelopes}) == 3
    assert {one.request_id.rpartition("-")[2] for one in envelopes} == {"1", "2", "3"}


async def test_images_come_as_base64(api: ApiUnderTest) -> None:
    client, endpoint = api.openai(), "/v1/images/generations"
    bodies = [
        {"prompt": "a circle", "size": "64x64", "seed": 7, "n": 2},
        {"prompt": "a star", "size": "64x64", "output_format": "webp", "model": IMAGE_MODEL.name},
    ]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": endpoint, "body": body}
        for n, body in enumerate(bodies)
    ]
    done = await until(client, await created(client, jsonl(lines), endpoint))
    assert done.status == "completed", done
    found = await answers(client, done.output_file_id)
    assert [len(one["response"]["body"]["data"]) for one in found] == [2, 1]
    first, second = (one["response"]["body"]["data"][0] for one in found)
    assert first["seed"] == 7
    assert base64.b64decode(first["b64_json"]).startswith(b"\x89PNG")
    assert base64.b64decode(second["b64_json"])[8:12] == b"WEBP"


@pytest.mark.usefixtures("small_segments")
async def test_canceled_batch_keeps_what_is_done(
    api: ApiUnderTest, held_after: Callable[[int], asyncio.Event]
) -> None:
    client = api.openai()
    held_after(9)
    batch = await created(client, jsonl(line(str(n)) for n in range(20)))
    await until_completed(client, batch, 7)
    cancelling = await client.batches.cancel(batch.id)
    assert cancelling.status in ("cancelling", "cancelled")
    assert cancelling.cancelling_at
    done = await until(client, batch, "cancelled")
    assert done.cancelled_at >= done.cancelling_at
    outputs = await answers(client, done.output_file_id)
    errors = await answers(client, done.error_file_id)
    assert done.request_counts.completed == len(outputs)
    assert len(outputs) in (7, 8, 9), "the lines of the next segment may be done or not"
    assert done.request_counts.failed == len(errors) == 20 - len(outputs)
    assert [one["custom_id"] for one in outputs + errors] == [str(n) for n in range(20)]
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert {one["response"] for one in errors} == {None}
    assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_batch_that_is_over_cannot_be_canceled(api: ApiUnderTest) -> None:
    client = api.openai()
    batch = await created(client, jsonl([line("1")]))
    await until(client, batch)
    with pytest.raises(openai.BadRequestError, match="completed"):
        await client.batches.cancel(batch.id)


@pytest.mark.usefixtures("small_segments")
async def test_expired_batch_says_which_lines_were_not_run(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "WINDOW_S", 2)
    client = api.openai()
    api.worker.is_silent = True
    batch = await created(client, jsonl(line(str(n)) for n in range(10)))
    done = await until(client, batch, "expired")
    assert done.expired_at
    assert done.request_counts.model_dump() == {"completed": 0, "failed": 10, "total": 10}
    errors = await answers(client, done.error_file_id)
    assert [one["custom_id"] for one in errors] == [str(n) for n in range(10)]
    assert {one["error"]["code"] for one in errors} == {"batch_expired"}


async def test_lines_rank_documents(api: ApiUnderTest) -> None:
    client = api.openai()
    body = {"model": TEXT_MODEL.name, "query": "which?", "documents": ["a", "b", "c"], "top_n": 2}
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/rerank", "body": body | {"top_n": n}}
        for n in (1, 2)
    ]
    done = await until(client, await created(client, jsonl(lines), "/v1/rerank"))
    assert done.status == "completed", done
    found = [one["response"]["body"] for one in await answers(client, done.output_file_id)]
    asked = (await api.http.post("/v1/rerank", json=body)).json()
    assert [one["results"] for one in found] == [asked["results"][:1], asked["results"]]
    assert done.usage.total_tokens == 2 * asked["usage"]["total_tokens"]
