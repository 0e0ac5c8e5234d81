"""Plan and key limits, as callers see them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis.asyncio

from api.limits.limited_request import STOPS_WITHIN_S
from api.limits.messages import duration
from shared.models.catalog import Catalog
from shared.models.entry import Price
from shared.stores.redis_client import NO_REDIS
from shared.tenants.plan import Limits, Plan, Rates
from tests.api.harness import (
    IMAGE_MODEL,
    TEXT_MODEL,
    WRITER,
    ApiUnderTest,
    running_api,
    settings_for,
)
from tests.api.predicting import TEXT, WAIT
from tests.keys import bearer, key_for, keys_url, stored
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
MODEL = TEXT_MODEL.name
PRICED = Catalog(
    (
        TEXT_MODEL.model_copy(update={"price": Price(per_million_tokens_usd=1000.0)}),
        IMAGE_MODEL,
        WRITER.model_copy(
            update={
                "price": Price(per_million_tokens_usd=1.0, per_million_output_tokens_usd=1000.0)
            }
        ),
    )
)
"""A token costs a tenth of a cent. FakeWorker counts the words in a text plus two."""
LONG_TEXT = 40 * "a"
RESERVED_USD = 0.042
"""Reserved for a text the length of LONG_TEXT: one token per byte, plus two special tokens."""
SPENT_USD = 0.003
"""The amount spent on that text: one word and the two special tokens."""


@asynccontextmanager
async def limited_api(
    tmp_path: Path,
    redis_url: str,
    plan: Plan,
    key_limits: Limits | None = None,
    catalog: Catalog = PRICED,
    **settings: object,
) -> AsyncIterator[ApiUnderTest]:
    """An API where the key `a` belongs to the tenant acme, which is on this plan."""
    url = keys_url(
        tmp_path,
        plans={"theirs": plan},
        tenants={"acme": "theirs"},
        keys=[stored("a", "acme", limits=key_limits)],
        other="other",
    )
    given = settings_for(tmp_path, redis_url=redis_url, keys_url=url, **settings)
    async with running_api(given, catalog=catalog) as api:
        yield api


async def embed(api: ApiUnderTest, *texts: str, key: str = "a", **headers: str) -> httpx.Response:
    return await api.http.post(
        "/v1/embeddings",
        json={"model": MODEL, "input": list(texts)},
        headers=bearer(key) | {name.replace("_", "-"): value for name, value in headers.items()},
    )


def limits_in(answer: httpx.Response) -> dict[str, str]:
    return {
        name.removeprefix("x-ratelimit-"): value
        for name, value in answer.headers.items()
        if name.startswith("x-ratelimit-")
    }


async def test_headers_are_those_of_openai(tmp_path: Path, redis_url: str) -> None:
    plan = Plan(requests_per_min=60, tokens_per_min=1000)
    async with limited_api(tmp_path, redis_url, plan) as api:
        answer = await embed(api, "one two three")
        assert limits_in(answer) == {
            "limit-requests": "60",
            "remaining-requests": "59",
            "reset-requests": "1m1s",
            "limit-tokens": "1000",
            "remaining-tokens": "995",
            "reset-tokens": "1m1s",
        }
        assert not limits_in(await embed(api, "one", key="other"))


async def test_refusal_is_what_openais_client_expects(tmp_path: Path, redis_url: str) -> None:
    async with limited_api(tmp_path, redis_url, Plan(requests_per_min=2)) as api:
        client = api.openai(api_key=key_for("a"))
        for text in ("one", "two"):
            await client.embeddings.create(model=MODEL, input=text)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.embeddings.create(model=MODEL, input="three")
        error, headers = refused.value, refused.value.response.headers
        assert (error.code, error.type, error.param) == ("rate_limit_exceeded", "requests", None)
        assert "requests per minute of tenant 'acme': limit 2, used 2, requested 1" in error.message
        assert 59 <= int(headers["retry-after"]) <= 60
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert len(api.worker.jobs) == 2
        rows = [row for row in api.rows if row.status == "refused"]
        assert [(row.error_code, row.cost_usd) for row in rows] == [("rate_limit_exceeded", 0.0)]


async def test_refusal_has_replicates_shape_on_its_routes(tmp_path: Path, redis_url: str) -> None:
    async with limited_api(tmp_path, redis_url, Plan(requests_per_min=1)) as api:
        first, second = [
            await api.http.post("/v1/predictions", json=TEXT, headers=bearer("a")) for _ in range(2)
        ]
        assert first.status_code == 201
        assert limits_in(first)["remaining-requests"] == "0"
        assert second.status_code == 429
        body = second.json()
        assert (body["title"], body["status"]) == ("Too Many Requests", 429)
        assert "requests per minute" in body["detail"]
        assert int(second.headers["retry-after"]) > 50


async def test_key_has_less_than_its_tenant(tmp_path: Path, redis_url: str) -> None:
    plan, few = Plan(requests_per_min=100), Limits(requests_per_min=1)
    async with limited_api(tmp_path, redis_url, plan, few) as api:
        answers = [await embed(api, "one"), await embed(api, "two")]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert limits_in(answers[0])["limit-requests"] == "1"
        assert "of key '" in answers[1].json()["error"]["message"]


async def test_work_is_settled_by_what_is_charged(tmp_path: Path, redis_url: str) -> None:
    """A hit is free here, so it does not count. Neither does a failed text."""
    async with limited_api(tmp_path, redis_url, Plan(tokens_per_min=1000)) as api:
        text = "w " * 100
        left = [
            limits_in(await embed(api, *texts))["remaining-tokens"]
            for texts in ((text,), (text,), ("broken",), ("a b", "c"))
        ]
        assert left == ["898", "898", "898", "891"]


async def test_replay_takes_nothing(tmp_path: Path, redis_url: str) -> None:
    async with limited_api(tmp_path, redis_url, Plan(requests_per_min=2)) as api:
        first = await embed(api, "one", idempotency_key="k")
        again = [await embed(api, "one", idempotency_key="k") for _ in range(5)]
        assert [answer.status_code for answer in (first, *again)] == [200] * 6
        assert limits_in(first)["remaining-requests"] == "1"
        assert not limits_in(again[0])
        assert limits_in(await embed(api, "two"))["remaining-requests"] == "0"


async def test_wrong_requests_take_nothing(tmp_path: Path, redis_url: str) -> None:
    async with limited_api(tmp_path, redis_url, Plan(requests_per_min=1)) as api:
        for _ in range(3):
            assert (await embed(api)).status_code == 400
        assert (await embed(api, "one")).status_code == 200


async def test_request_that_finds_no_room_takes_nothing(tmp_path: Path, redis_url: str) -> None:
    plan = Plan(requests_per_min=3, tokens_per_min=1000)
    async with limited_api(tmp_path, redis_url, plan, max_in_flight=1) as api:
        api.worker.go.clear()
        waiting = asyncio.create_task(embed(api, "one"))
        await api.worker.until_taken(1)
        refused = [await embed(api, f"text {number}") for number in range(4)]
        api.worker.go.set()
        await waiting
        assert {answer.json()["error"]["code"] for answer in refused} == {"overloaded"}
        assert limits_in(await embed(api, "last"))["remaining-requests"] == "1"


async def test_items_in_flight_are_bounded(tmp_path: Path, redis_url: str) -> None:
    async with limited_api(tmp_path, redis_url, Plan(max_in_flight=3)) as api:
        api.worker.go.clear()
        waiting = asyncio.create_task(embed(api, "one", "two"))
        await api.worker.until_taken(1)
        refused = await embed(api, "three", "four")
        assert refused.json()["error"]["type"] == "items"
        other = asyncio.create_task(embed(api, "theirs", key="other"))
        await api.worker.until_taken(2)
        api.worker.go.set()
        assert [(await one).status_code for one in (waiting, other)] == [200, 200]
        assert (await embed(api, "three", "four", "five")).status_code == 200
        assert (await embed(api, "1", "2", "3", "4")).headers["x-should-retry"] == "false"


async def test_spent_budget_is_insufficient_quota(tmp_path: Path, redis_url: str) -> None:
    """Three words cost half a cent. The reservation assumes one token per byte."""
    async with limited_api(tmp_path, redis_url, Plan(budget_usd_per_month=0.016)) as api:
        answers = [await embed(api, f"one two {number}") for number in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        error = answers[-1].json()["error"]
        assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
        assert "US dollars per month of tenant 'acme': limit 0.016, used 0.01" in error["message"]
        assert answers[-1].headers["x-should-retry"] == "false"
        assert int(answers[-1].headers["retry-after"]) > 0
        assert (await embed(api, "one two 1")).status_code == 429, "a hit is reserved in full"
        assert (await embed(api, "one", key="other")).status_code == 200


async def test_budget_that_is_only_reserved_is_worth_asking_for_again(
    tmp_path: Path, redis_url: str
) -> None:
    plan = Plan(budget_usd_per_month=2.5 * RESERVED_USD)
    async with limited_api(tmp_path, redis_url, plan) as api:
        api.worker.go.clear()
        waiting = [asyncio.create_task(embed(api, LONG_TEXT[1:] + end)) for end in "ab"]
        await api.worker.until_taken(2)
        refused = await embed(api, LONG_TEXT[1:] + "c")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "x-should-retry" not in refused.headers
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "spent 0, reserved 0.084, requested 0.042" in error["message"]
        rows = [row for row in api.rows if row.status == "refused"]
        assert [(row.error_code, row.cost_usd) for row in rows] == [("rate_limit_exceeded", 0.0)]
        api.worker.go.set()
        assert [(await request).status_code for request in waiting] == [200, 200]
        assert (await embed(api, LONG_TEXT[1:] + "c")).status_code == 200, "no longer reserved"


async def test_text_that_the_rest_of_a_budget_can_not_reserve_is_insufficient_quota(
    tmp_path: Path, redis_url: str
) -> None:
    """The last text is rejected even though the remaining budget would cover its actual cost."""
    plan = Plan(budget_usd_per_month=RESERVED_USD + 2.5 * SPENT_USD)
    async with limited_api(tmp_path, redis_url, plan) as api:
        answers = [await embed(api, LONG_TEXT[1:] + end) for end in "abcd"]
        assert [answer.status_code for answer in answers] == [200] * 3 + [429]
        assert answers[-1].json()["error"]["code"] == "insufficient_quota"
        assert answers[-1].headers["x-should-retry"] == "false"


async def test_texts_at_once_stay_within_the_budget(tmp_path: Path, redis_url: str) -> None:
    """Each generates 60 tokens at the output price and has a prompt of punctuation."""
    body = {"model": "writer", "prompt": "{}[]()" * 20, "max_tokens": 60}
    async with limited_api(tmp_path, redis_url, Plan(budget_usd_per_month=0.5)) as api:
        path, headers = "/v1/completions", bearer("a")
        answers = await asyncio.gather(
            *(api.http.post(path, json=body, headers=headers) for _ in range(30))
        )
        served = [answer for answer in answers if answer.status_code == 200]
        spent = sum(float(answer.headers["x-penstock-cost-usd"]) for answer in served)
        assert len(served) == 8
        assert spent <= 0.5


@pytest.mark.parametrize("limit", [{}, {"cancel_after": "1s"}])
async def test_seconds_are_reserved_until_the_answer_is_due(
    tmp_path: Path, redis_url: str, limit: dict[str, str]
) -> None:
    """Cancel-After stops predictions, but not requests whose caller waits for the response."""
    by_second = TEXT_MODEL.model_copy(update={"price": Price(per_second_usd=1.0)})
    due_s = by_second.deadline.default_s + STOPS_WITHIN_S
    for budget_usd, status in ((due_s - 1, 429), (due_s + 1, 200)):
        plan, catalog = Plan(budget_usd_per_month=budget_usd), Catalog((by_second,))
        async with limited_api(tmp_path, redis_url, plan, catalog=catalog) as api:
            assert (await embed(api, "one", **limit)).status_code == status


async def test_counting_tokens_needs_no_budget(tmp_path: Path, redis_url: str) -> None:
    by_item = WRITER.model_copy(update={"price": Price(per_item_usd=0.25, per_second_usd=1.0)})
    plan, catalog = Plan(budget_usd_per_month=0.01), Catalog((by_item,))
    async with limited_api(tmp_path, redis_url, plan, catalog=catalog) as api:
        body = {"model": "writer", "prompt": "one two"}
        counted = await api.http.post("/v1/tokenize", json=body, headers=bearer("a"))
        assert (counted.status_code, counted.json()["count"]) == (200, 2)
        assert counted.headers["x-penstock-cost-usd"] == "0"
        assert [job.envelope.price_share for job in api.worker.jobs] == [0.0]


async def test_prediction_is_settled_if_its_end_is_waited_for(
    tmp_path: Path, redis_url: str
) -> None:
    async with limited_api(tmp_path, redis_url, Plan(tokens_per_min=1000)) as api:
        headers = bearer("a")
        long_text = {"version": MODEL, "input": {"text": "x" * 400}}
        waited = await api.http.post("/v1/predictions", json=long_text, headers=headers | WAIT)
        assert limits_in(waited)["remaining-tokens"] == "997"
        created = await api.http.post("/v1/predictions", json=long_text, headers=headers)
        assert limits_in(created)["remaining-tokens"] == str(997 - 102)


async def test_prediction_is_settled_when_it_ends(tmp_path: Path, redis_url: str) -> None:
    """No caller is waiting for it.

    A failed prediction costs nothing, and its item is no longer in flight.
    """
    plan = Plan(tokens_per_min=1000, max_in_flight=1, budget_usd_per_month=0.258)
    async with limited_api(tmp_path, redis_url, plan) as api:
        api.worker.broken.add("x" * 200)
        api.worker.go.clear()
        body = {"version": MODEL, "input": {"text": "x" * 200}}
        headers = bearer("a")
        created = (await api.http.post("/v1/predictions", json=body, headers=headers)).json()
        refused = await api.http.post("/v1/predictions", json=body, headers=headers)
        assert "items in flight" in refused.json()["detail"]
        api.worker.go.set()
        async with asyncio.timeout(WAIT_LIMIT_S):
            while (answer := await embed(api, "one two")).status_code == 429:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        found = (await api.http.get(f"/v1/predictions/{created['id']}", headers=headers)).json()
        assert (found["status"], found["metrics"]["cost_usd"]) == ("failed", 0)
        assert limits_in(answer)["remaining-tokens"] == "996"
        assert limits_in(answer)["limit-tokens"] == "1000"
        # It reserves 256 tokens, the most the model can read.
        spent = await embed(api, "y" * 416)
        assert spent.json()["error"]["code"] == "insufficient_quota"
        assert "used 0.004," in spent.json()["error"]["message"]


async def until_spent(redis_url: str, usd: float) -> None:
    """Waits until the budget's counter shows the amount."""
    async with redis.asyncio.Redis.from_url(redis_url) as client, asyncio.timeout(WAIT_LIMIT_S):
        used = None
        while used != pytest.approx(usd, abs=1e-9):
            await asyncio.sleep(0.02)
            used = float(await client.hget("penstock:limits:month:t:acme:usd", "used") or 0)


async def test_predictions_of_an_instance_that_died_are_settled(
    tmp_path: Path, redis_url: str
) -> None:
    body, plan = {"version": MODEL, "input": {"text": "x" * 200}}, Plan(budget_usd_per_month=0.25)
    (tmp_path / "other").mkdir()
    async with limited_api(tmp_path, redis_url, plan) as api:
        api.dependencies.follower._sweep_task.cancel()  # as if the instance had died
        created = await api.http.post("/v1/predictions", json=body, headers=bearer("a"))
        assert created.status_code == 201
        assert (await embed(api, "y" * 230)).status_code == 429
        async with limited_api(tmp_path / "other", redis_url, plan) as other:
            await until_spent(redis_url, 0.003)
            assert (await embed(other, "y" * 230)).status_code == 200


async def test_a_prediction_that_has_used_its_whole_request_gives_its_budget_back(
    tmp_path: Path, redis_url: str
) -> None:
    """The request remains counted, but its budget is returned, except for the price."""
    plan = Plan(requests_per_min=100, budget_usd_per_month=1.0)
    body = {"version": MODEL, "input": {"text": "x" * 200}}
    async with limited_api(tmp_path, redis_url, plan) as api:
        created = await api.http.post("/v1/predictions", json=body, headers=bearer("a"))
        assert created.status_code == 201
        await until_spent(redis_url, 0.003)
        assert limits_in(await embed(api, "one two"))["remaining-requests"] == "98"


async def test_plan_of_batch_lowers_the_priority(tmp_path: Path, redis_url: str) -> None:
    async with limited_api(tmp_path, redis_url, Plan(max_priority="batch")) as api:
        for headers in ({}, {"x_penstock_lane": "interactive"}, {"x_penstock_lane": "batch"}):
            answer = await embed(api, f"one {headers}", **headers)
            assert answer.status_code == 200
        assert [job.envelope.priority for job in api.worker.jobs] == ["batch"] * 3
        assert (await embed(api, "say it")).headers["x-penstock-lane"] == "batch"
        assert "x-penstock-lane" not in (await embed(api, "one", key="other")).headers


async def test_images_are_counted_in_pixel_steps(tmp_path: Path, redis_url: str) -> None:
    body: dict[str, Any] = {"prompt": "a cat", "size": "64x64", "n": 2, "seed": 1}
    plan = Plan(pixel_steps_per_min=64 * 64 * 100, tokens_per_min=5)
    async with limited_api(tmp_path, redis_url, plan) as api:
        body["num_inference_steps"] = 20
        answers = [
            await api.http.post(
                "/v1/images/generations", json=body | {"seed": seed}, headers=bearer("a")
            )
            for seed in (1, 10, 20)
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert limits_in(answers[1])["remaining-pixel-steps"] == str(64 * 64 * 20)
        assert answers[2].json()["error"]["type"] == "pixel_steps"


async def test_one_model_may_have_less(tmp_path: Path, redis_url: str) -> None:
    plan = Plan(per_model={MODEL: Rates(requests_per_min=1)})
    async with limited_api(tmp_path, redis_url, plan) as api:
        assert [(await embed(api, text)).status_code for text in ("a", "b")] == [200, 429]


async def test_limits_hold_without_redis(tmp_path: Path) -> None:
    async with limited_api(tmp_path, NO_REDIS, Plan(requests_per_min=3)) as api:
        found = [(await embed(api, f"text {number}")).status_code for number in range(5)]
        assert found == [200, 200, 200, 429, 429]


async def test_budget_that_can_not_be_checked_is_not_spent(tmp_path: Path) -> None:
    """It is rejected with a 503 unless the plan allows requests during outages."""
    statuses = []
    for on_outage in ("deny", "allow"):
        plan = Plan(budget_usd_per_month=1.0, on_limit_store_outage=on_outage)
        folder = tmp_path / on_outage
        folder.mkdir()
        async with limited_api(folder, NO_REDIS, plan) as api:
            answer = await embed(api, "one two")
            statuses.append(answer.status_code)
            if answer.status_code == 503:
                message = answer.json()["error"]["message"]
                assert message == (
                    "US dollars per month of tenant 'acme' can't be checked now. Try again later."
                )
    assert statuses == [503, 200]


async def test_caller_who_hangs_up_has_used_the_request(tmp_path: Path, redis_url: str) -> None:
    plan = Plan(requests_per_min=5, tokens_per_min=1000, max_in_flight=1)
    async with limited_api(tmp_path, redis_url, plan) as api:
        api.worker.go.clear()
        gone = asyncio.create_task(embed(api, "x" * 400))
        await api.worker.until_taken(1)
        gone.cancel()
        await asyncio.wait([gone])
        await api.until_idle()
        api.worker.go.set()
        after = limits_in(await embed(api, "one two"))
        assert after["remaining-requests"] == "3"
        assert after["remaining-tokens"] == str(1000 - 102 - 4)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0s"),
        (0.0005, "1ms"),
        (0.017, "17ms"),
        (0.9999, "1s"),
        (1, "1s"),
        (1.2, "2s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (86_399, "23h59m59s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
