"""A streamed text that ends early costs only its delivered tokens, across API and worker."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.models.catalog import Catalog
from shared.models.entry import Generation
from shared.tenants.plan import Plan
from shared.usage.row import Row
from tests.api.fake_worker import FakeWorker
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.keys import bearer, keys_url
from tests.limits import WAIT_LIMIT_S
from tests.workers.test_steps import MODEL, spelling
from tests.workers.worker_harness import WorkerHarness

pytestmark = pytest.mark.anyio

LONG = MODEL.model_copy(
    update={
        "generation": Generation(context_tokens=10**7, default_tokens=4, longest_tokens=10**6),
        "batch": MODEL.batch.model_copy(update={"max_tokens": 10**7}),
    }
)
LIMIT = 10**7
BODY_TOKENS = 10**6
BODY = {
    "model": "letters",
    "prompt": "abc",
    "max_tokens": BODY_TOKENS,
    "temperature": 0,
    "stream": True,
}
ACME = bearer("a")


@asynccontextmanager
async def served(redis_url: str, folder: Path) -> AsyncIterator[tuple[ApiUnderTest, WorkerHarness]]:
    """An API with a worker that spells. The tenant has limits, and may run one text at a time."""
    plan = Plan(tokens_per_min=LIMIT, max_in_flight=1)
    keys = keys_url(folder, plans={"p": plan}, tenants={"acme": "p"}, a="acme")
    settings = settings_for(folder, redis_url=redis_url, keys_url=keys)
    async with spelling(redis_url, folder, model=LONG) as harness:
        nobody, catalog = FakeWorker(harness.broker, ()), Catalog((LONG,))
        async with running_api(
            settings, harness.broker, harness.broker, catalog, worker=nobody
        ) as api:
            yield api, harness


async def pieces(answer: httpx.Response) -> AsyncGenerator[tuple[str, str]]:
    """Each event's id and its text."""
    place = ""
    async for line in answer.aiter_lines():
        if line.startswith("id: "):
            place = line.removeprefix("id: ")
        elif line.startswith("data: {"):
            yield place, json.loads(line.removeprefix("data: "))["choices"][0]["text"]


async def read_and_leave(api: ApiUnderTest, letters: int) -> str:
    """Reads the start of a resumable text, then hangs up."""
    text, headers = "", ACME | {"x-penstock-event-ids": "true"}
    async with api.http.stream("POST", "/v1/completions", json=BODY, headers=headers) as answer:
        assert answer.status_code == 200
        async with aclosing(pieces(answer)) as found:
            async for _, piece in found:
                text += piece
                if len(text) >= letters:
                    return text
    raise AssertionError("the text ended early")


async def check_counted(api: ApiUnderTest, row: Row) -> None:
    """Checks that the counted tokens cover the generated part, which is at least the delivered
    part.
    """
    assert row.tokens is not None
    assert row.tokens <= await used_tokens(api) <= row.tokens + BODY_TOKENS


async def used_tokens(api: ApiUnderTest) -> int:
    """Tokens the tenant has used, once it has nothing in flight."""
    body = {"model": "letters", "prompt": "x", "max_tokens": 1}
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            answer = await api.http.post("/v1/completions", json=body, headers=ACME)
            if answer.status_code == 200:
                return LIMIT - int(answer.headers["x-ratelimit-remaining-tokens"]) - 2
            assert answer.status_code == 429, answer.text
            await asyncio.sleep(0.05)


async def only_prediction(api: ApiUnderTest) -> dict[str, Any]:
    listed = (await api.http.get("/v1/predictions", headers=ACME)).json()["results"]
    found = await api.http.get(f"/v1/predictions/{listed[-1]['id']}", headers=ACME)
    prediction: dict[str, Any] = found.json()
    return prediction


async def test_a_stream_that_is_canceled_costs_what_went_out(
    redis_url: str, tmp_path: Path
) -> None:
    async with served(redis_url, tmp_path) as (api, harness):
        text = await read_and_leave(api, 50)
        made = await only_prediction(api)
        await api.http.post(f"/v1/predictions/{made['id']}/cancel", headers=ACME)
        await harness.until(lambda: len(harness.rows) == 1)
        [row] = harness.rows
        assert row.status == "canceled"
        assert row.input_tokens == 3
        # This may be slightly more, because the instance had read ahead when the caller hung up.
        assert row.output_tokens is not None
        [written] = await harness.stores.tokens.read_written([(row.request_id, 0)])
        assert len(text) <= row.output_tokens <= written[-1].end
        assert row.cost_usd == pytest.approx((3 * 2 + row.output_tokens * 6) / 1e6)
        assert (await only_prediction(api))["metrics"]["cost_usd"] == row.cost_usd
        await check_counted(api, row)


async def test_a_stream_that_is_canceled_and_deleted_at_once_costs_what_went_out(
    redis_url: str, tmp_path: Path
) -> None:
    async with served(redis_url, tmp_path) as (api, harness):
        text = await read_and_leave(api, 50)
        made = (await only_prediction(api))["id"]
        # Before its worker has reported the cost.
        await api.http.post(f"/v1/predictions/{made}/cancel", headers=ACME)
        answer = await api.http.delete(f"/v1/predictions/{made}", headers=ACME)
        assert answer.status_code < 300, answer.text
        await harness.until(lambda: len(harness.rows) == 1)
        [row] = harness.rows
        assert (row.status, row.input_tokens) == ("canceled", 3)
        assert row.output_tokens is not None
        assert row.output_tokens >= len(text)
        assert row.cost_usd == pytest.approx((3 * 2 + row.output_tokens * 6) / 1e6)
        await check_counted(api, row)


async def test_a_text_that_is_deleted_at_its_end_counts_as_charged(
    redis_url: str, tmp_path: Path
) -> None:
    async with served(redis_url, tmp_path) as (api, harness):
        body = {**BODY, "max_tokens": 3}
        streamed = await api.http.post("/v1/completions", json=body, headers=ACME)
        assert "[DONE]" in streamed.text
        made = (await only_prediction(api))["id"]
        answer = await api.http.delete(f"/v1/predictions/{made}", headers=ACME)
        assert answer.status_code < 300, answer.text
        [row] = harness.rows
        assert await used_tokens(api) == row.tokens


async def test_a_text_that_its_own_schema_fails_costs_what_was_read(
    redis_url: str, tmp_path: Path
) -> None:
    async with served(redis_url, tmp_path) as (api, harness):
        counted = 0
        endings = (("%", "schema_not_matched"), ("#", "invalid_input"), ("$", None))
        for before, (sign, code) in enumerate(endings):
            body = BODY | {"prompt": f"{sign}bc", "max_tokens": 1000}
            streamed = await api.http.post("/v1/completions", json=body, headers=ACME)
            *texts, error = (
                json.loads(line.removeprefix("data: "))
                for line in streamed.text.splitlines()
                if line.startswith("data: {")
            )
            assert error["error"]["code"] == (code or "model_failed")
            text = "".join(one["choices"][0]["text"] for one in texts)
            assert text, "it was read before it failed"
            row = [one for one in harness.rows if one.status == "failed"][before]
            assert row.cost_usd == pytest.approx((3 * 2 + len(text) * 6) / 1e6 if code else 0)
            counted += 3 + len(text) if code else 1  # our fault, so it is free but counts
            used = await used_tokens(api)
            assert counted + 2 * before <= used <= 1003 * (before + 1) + 2 * before


async def test_a_stream_that_nobody_reads_any_more_costs_what_went_out(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.predictions.generation_stream.LEFT_S", 1.1)
    monkeypatch.setattr("shared.stores.token_streams.READER_S", 1)
    async with served(redis_url, tmp_path) as (api, harness):
        text = await read_and_leave(api, 50)
        await harness.until(lambda: len(harness.rows) == 1)
        [row] = harness.rows
        assert row.status == "canceled"
        assert row.output_tokens is not None
        [written] = await harness.stores.tokens.read_written([(row.request_id, 0)])
        assert len(text) <= row.output_tokens < written[-1].end, "it was written on for a second"
        assert row.cost_usd == pytest.approx((3 * 2 + row.output_tokens * 6) / 1e6)
        await check_counted(api, row)


async def test_a_stream_of_many_tokens_takes_two_messages(redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path) as (api, harness):
        published, body = harness.broker.published, BODY | {"max_tokens": 3000}
        given: dict[str, Any] = {"json": body, "headers": ACME}
        async with (
            api.http.stream("POST", "/v1/completions", **given) as answer,
            aclosing(pieces(answer)) as found,
        ):
            events = [piece async for _, piece in found]
        assert len("".join(events)) == 3000
        assert len(events) > 3, "it was streamed"
        await harness.until(lambda: len(harness.rows) == 1)
        assert harness.broker.published - published <= 2


async def test_an_instance_that_stops_leaves_no_task_of_its_streams(
    redis_url: str, tmp_path: Path
) -> None:
    def tasks() -> list[str]:
        names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
        return [one for one in names if one.startswith(("GenerationStreams.", "TokenReader."))]

    async with served(redis_url, tmp_path) as (api, harness):
        await read_and_leave(api, 5)
        await harness.until(lambda: "GenerationStreams._cancel_unread" in tasks())
        made = await only_prediction(api)
        await api.http.post(f"/v1/predictions/{made['id']}/cancel", headers=ACME)
    assert tasks() == []
