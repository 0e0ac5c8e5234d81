"""Events reach a receiver in the Standard Webhooks format, through the function that Pub/Sub
calls.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from typing import Literal

import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from redis import Redis

from infra.local.process import free_port
from shared.messages import ItemError, ItemOutcome, Receipt, ReplyBody, encode_reply_body
from shared.models.tasks.custom import PieceChunk
from shared.models.tasks.embedding import EmbeddingResult
from shared.models.tasks.text import TokenChunk
from shared.predictions import encode_end
from shared.stores.token_streams import Written
from shared.webhooks.event import tenant_secrets
from tests.limits import WAIT_LIMIT_S
from tests.workers.functions.conftest import SECRETS
from tests.workers.functions.receiver import Delivery, Receiver
from tests.workers.functions.world import World
from workers.functions.deliveries import DeliveryState

pytestmark = pytest.mark.anyio

METRIC = "penstock_functions_webhooks_total"


async def finish(world: World, state: Literal["succeeded", "failed"] = "succeeded") -> None:
    result = EmbeddingResult(b"\0\0\x80?", 2)
    body = ReplyBody([ItemOutcome(0, state, Receipt(), result)], worker="w")
    await world.stores.records.finish(world.request_id, state, encode_reply_body(body))


def check(delivery: Delivery, secret: str) -> None:
    client = OpenAI(api_key="none", webhook_secret=secret)
    client.webhooks.verify_signature(delivery.body.decode(), dict(delivery.headers))


async def test_clients_verify_what_comes(world: World, receiver: Receiver) -> None:
    await world.create(receiver.url)
    await finish(world)
    await world.tell("completed")
    (delivery,) = await receiver.wait(1)
    body = json.loads(delivery.body)
    assert (body["id"], body["status"], body["output"]) == (world.request_id, "succeeded", [[1.0]])
    assert delivery.headers["content-type"] == "application/json"
    new, old = tenant_secrets(SECRETS, "t")
    check(delivery, new)
    check(delivery, old)


async def test_end_of_a_deleted_prediction_is_told_without_its_data(
    world: World, receiver: Receiver
) -> None:
    """A caller that deletes a finished prediction still wants to be notified that it finished."""
    prediction = await world.create(receiver.url)
    await finish(world)
    unreadable = await world.count("penstock_functions_unreadable_total", "webhook", 0)
    end = encode_end(prediction, await world.record())
    await world.stores.webhook_log.keep_end(world.request_id, end)
    assert await world.stores.predictions.delete(
        world.request_id, await world.record(), prediction.deadline_s
    )
    dropped = await world.count(METRIC, "deleted", 0)
    await world.tell("start")
    await world.count(METRIC, "deleted", dropped + 1)
    await world.tell("completed")
    (delivery,) = await receiver.wait(1)
    check(delivery, tenant_secrets(SECRETS, "t")[0])
    body = json.loads(delivery.body)
    assert (body["id"], body["status"]) == (world.request_id, "succeeded")
    assert (body["input"], body["output"], body["data_removed"]) == ({}, None, True)
    assert body["completed_at"] is not None
    assert b"a cat" not in delivery.body
    async with asyncio.timeout(WAIT_LIMIT_S):
        while await world.stores.webhook_log.end_of(world.request_id) is not None:  # noqa: ASYNC110 - Redis gives no signal
            await asyncio.sleep(0.01)
    await world.tell("completed")  # a redelivery
    await world.count(METRIC, "deleted", dropped + 2)
    assert len(receiver.deliveries) == 1
    assert await world.count("penstock_functions_unreadable_total", "webhook", 0) == unreadable


async def test_prediction_that_is_gone_is_no_error(world: World, receiver: Receiver) -> None:
    prediction = await world.create(receiver.url)
    await finish(world)
    dropped = await world.count(METRIC, "deleted", 0)
    unreadable = await world.count("penstock_functions_unreadable_total", "webhook", 0)
    assert await world.stores.predictions.delete(
        world.request_id, await world.record(), prediction.deadline_s
    )
    await world.tell("completed")
    await world.count(METRIC, "deleted", dropped + 1)
    assert receiver.deliveries == []
    assert await world.count("penstock_functions_unreadable_total", "webhook", 0) == unreadable


@pytest.mark.parametrize("setting", [SECRETS.split(",")[0], "whsec_" + "eHh4" * 8])
async def test_other_secrets_do_not_verify(world: World, receiver: Receiver, setting: str) -> None:
    await world.create(receiver.url)
    await finish(world)
    await world.tell("completed")
    (delivery,) = await receiver.wait(1)
    for secret in (setting, *tenant_secrets(SECRETS, "another")):
        with pytest.raises(InvalidWebhookSignatureError):
            check(delivery, secret)


async def test_failed_delivery_comes_again_under_the_same_id(
    world: World, receiver: Receiver
) -> None:
    receiver.statuses = [500, 302]
    await world.create(receiver.url)
    await finish(world)
    await world.tell("completed")
    deliveries = await receiver.wait(3)
    assert len({delivery.id for delivery in deliveries}) == 1
    assert [hmac.compare_digest(delivery.body, deliveries[0].body) for delivery in deliveries] == [
        True
    ] * 3
    assert (await world.record()).state == "succeeded"


async def test_each_attempt_leaves_a_row(world: World, receiver: Receiver) -> None:
    receiver.statuses = [500, 302]
    await world.create(receiver.url)
    await finish(world)
    await world.tell("completed")
    sent = await receiver.wait(3)
    rows = await world.deliveries(3)
    seen = [(row["attempt"], row["outcome"], row["status_code"], row["error"]) for row in rows]
    assert seen == [
        (1, "failed", 500, None),
        (2, "failed", 302, "redirected"),
        (3, "delivered", 204, None),
    ]
    assert {row["delivery_id"] for row in rows} == {sent[0].id}
    for row in rows:
        assert (row["tenant"], row["model"], row["event"]) == ("t", world.model, "completed")
        assert row["region"] == "here"
        assert row["published_at"] <= row["delivered_at"]
        assert row["duration_ms"] > 0


async def test_row_of_a_receiver_that_is_gone_says_so(world: World) -> None:
    await world.create(f"http://127.0.0.1:{free_port()}/")
    await world.tell("start")
    first, *_ = await world.deliveries(1)
    assert (first["outcome"], first["status_code"], first["error"]) == (
        "failed",
        None,
        "unreachable",
    )


async def test_events_have_ids_of_their_own(world: World, receiver: Receiver) -> None:
    await world.create(receiver.url)
    await world.tell("start")
    await receiver.wait(1)
    await finish(world)
    await world.tell("completed")
    started, completed = await receiver.wait(2)
    assert started.id != completed.id
    assert [json.loads(each.body)["status"] for each in (started, completed)] == [
        "starting",
        "succeeded",
    ]


async def test_nothing_comes_after_the_end(
    world: World, receiver: Receiver, functions_settings: dict[str, str]
) -> None:
    late = await world.count(METRIC, "late", 0)
    await world.create(receiver.url)
    await finish(world)
    await world.tell("completed")
    await receiver.wait(1)
    # The counters also include deliveries from earlier tests that finish now, so this checks the
    # outcome itself.
    async with DeliveryState(functions_settings["PENSTOCK_REDIS_URL"]) as notes:
        async with asyncio.timeout(WAIT_LIMIT_S):
            while await notes.admit(world.request_id, "completed") != "late":  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    await world.tell("start")
    await world.tell("completed")
    await world.tell("logs")
    await world.count(METRIC, "late", late + 3)
    assert len(receiver.deliveries) == 1


async def test_gone_ends_all_of_it(world: World, receiver: Receiver) -> None:
    late = await world.count(METRIC, "late", 0)
    receiver.statuses = [410]
    await world.create(receiver.url)
    await world.tell("start")
    await receiver.wait(1)
    await world.count(METRIC, "gone")
    await finish(world)
    await world.tell("completed")
    await world.count(METRIC, "late", late + 1)
    assert len(receiver.deliveries) == 1


async def test_output_is_told_of_twice_a_second_at_most(world: World, receiver: Receiver) -> None:
    throttled = await world.count(METRIC, "throttled", 0)
    await world.create(receiver.url)
    began_s = time.monotonic()
    for number in range(20):
        await world.tell("output", number + 1)
    told = (await receiver.wait(1), await world.count(METRIC, "throttled", throttled + 1))
    spent_s = time.monotonic() - began_s
    assert told
    assert len(receiver.deliveries) <= 1 + spent_s / 0.5


async def test_only_the_events_that_were_asked_for(world: World, receiver: Receiver) -> None:
    unwanted = await world.count(METRIC, "unwanted", 0)
    await world.create(receiver.url, ("completed",))
    await world.tell("start")
    await world.count(METRIC, "unwanted", unwanted + 1)
    await finish(world)
    await world.tell("completed")
    await receiver.wait(1)
    assert len(receiver.deliveries) == 1


async def test_end_waits_for_the_record(world: World, receiver: Receiver) -> None:
    failed = await world.count("penstock_functions_failed_total", "webhook", 0)
    await world.create(receiver.url)
    await world.tell("completed")
    await world.count("penstock_functions_failed_total", "webhook", failed + 1)
    assert receiver.deliveries == []
    await finish(world)
    (delivery,) = await receiver.wait(1)
    assert json.loads(delivery.body)["status"] == "succeeded"


@pytest.mark.parametrize(
    ("status", "age_s", "end", "answered"),
    [
        (404, 60, "failed", 503),
        (404, 4000, "refused", 204),
        (302, 4000, "refused", 204),
        (429, 4000, "failed", 503),
        (503, 4000, "failed", 503),
    ],
)
async def test_refusals_are_repeated_for_an_hour(
    world: World,
    receiver: Receiver,
    functions_settings: dict[str, str],
    status: int,
    age_s: int,
    end: str,
    answered: int,
) -> None:
    receiver.statuses = [404, status]
    await world.create(receiver.url)
    # No matter how long the event has already waited, the hour starts at the first rejection.
    assert await world.push_event("start", 2 * age_s) == 503
    before = await world.count(METRIC, end, 0)
    redis = Redis.from_url(functions_settings["PENSTOCK_REDIS_URL"])
    key = f"penstock:webhook:{receiver.deliveries[0].id}:refused"
    assert redis.set(key, time.time() - age_s, xx=True)
    assert await world.push_event("start", 2 * age_s) == answered
    assert await world.count(METRIC, end) == before + 1


async def test_events_are_due_without_redis() -> None:
    async with DeliveryState(f"redis://127.0.0.1:{free_port()}/0") as notes:
        assert [await notes.admit("req_1", event) for event in ("logs", "logs", "completed")] == [
            "due"
        ] * 3
        await notes.close("req_1")


async def test_events_of_a_running_class_have_its_output_so_far(
    world: World, receiver: Receiver
) -> None:
    await world.create(receiver.url, streams="text")
    (claim,) = await world.stores.records.claim([world.request_id])
    assert claim is not None
    chunk = PieceChunk(0, "a cat", [2, 0, 3])
    written = Written(world.request_id, 0, claim.attempt, chunk)
    assert await world.stores.tokens.append([written]) == [3]
    await world.tell("output", 3)
    (delivery,) = await receiver.wait(1)
    body = json.loads(delivery.body)
    assert (body["status"], body["output"]) == ("processing", ["a ", "", "cat"])


async def test_the_end_of_a_class_that_failed_has_what_it_had_yielded(
    world: World, receiver: Receiver
) -> None:
    await world.create(receiver.url, streams="text")
    yielded = PieceChunk(0, "a cat", [2, 3])
    error = ItemError("model_failed", "no")
    outcome = ItemOutcome(0, "failed", Receipt(), error=error, partial=yielded)
    body = encode_reply_body(ReplyBody([outcome]))
    await world.stores.records.finish(world.request_id, "failed", body)
    await world.tell("completed")
    (delivery,) = await receiver.wait(1)
    shown = json.loads(delivery.body)
    assert (shown["output"], shown["error"]) == (["a ", "cat"], "no")


async def test_what_an_earlier_worker_wrote_is_not_guessed(
    world: World, receiver: Receiver
) -> None:
    """Release 0.1.0 wrote texts without recording the lengths of their pieces."""
    await world.create(receiver.url, streams="text")
    (claim,) = await world.stores.records.claim([world.request_id])
    assert claim is not None
    written = Written(world.request_id, 0, claim.attempt, TokenChunk(0, [1, 2], "a cat"))
    assert await world.stores.tokens.append([written]) == [2]
    await world.tell("output", 2)
    (delivery,) = await receiver.wait(1)
    assert json.loads(delivery.body)["output"] is None
