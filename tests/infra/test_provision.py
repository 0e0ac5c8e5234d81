"""What the local stack creates on the broker: everything that API and workers use, and again without harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.local.provision import provision
from shared.catalogue import read_catalogue
from shared.names import (
    batch_subscription_id,
    dead_letter_subscription_id,
    inbox_topic_id,
    jobs_topic_id,
    slot_subscription_id,
    workers_subscription_id,
)
from shared.pubsub import PubSubTransport
from shared.pubsub_admin import PubSubAdmin

CATALOGUE = read_catalogue(Path("models.yaml"))


@pytest.mark.anyio
async def test_everything_in_use_is_created(pubsub_endpoint: str) -> None:
    async with PubSubAdmin("provisioned", pubsub_endpoint) as admin:
        for _ in range(2):
            await provision(admin, CATALOGUE, inbox_pool=2, slots=3)
        wanted = [slot_subscription_id(inbox, slot) for inbox in "01" for slot in range(3)]
        for model in CATALOGUE.models:
            wanted += [workers_subscription_id(model.name), batch_subscription_id(model.name)]
            wanted += [dead_letter_subscription_id(model.name)]
        assert [await admin.subscription_exists(subscription_id) for subscription_id in wanted] == [True] * len(wanted)
        assert not await admin.subscription_exists(slot_subscription_id("2", 0))


@pytest.mark.anyio
async def test_reply_reaches_its_slot_only(pubsub_endpoint: str) -> None:
    async with PubSubAdmin("slots", pubsub_endpoint) as admin, PubSubTransport("slots", pubsub_endpoint) as broker:
        await provision(admin, CATALOGUE, inbox_pool=1, slots=2)
        async with (
            broker.subscribe(slot_subscription_id("0", 0), max_messages=5) as first,
            broker.subscribe(slot_subscription_id("0", 1), max_messages=5) as second,
        ):
            await broker.publish(inbox_topic_id("0"), b"for 1", {"slot": "1"})
            await broker.publish(inbox_topic_id("0"), b"for 0", {"slot": "0"})
            got = [(await anext(aiter(each))).data for each in (first, second)]
        assert got == [b"for 0", b"for 1"]


@pytest.mark.anyio
async def test_job_has_one_lane(pubsub_endpoint: str) -> None:
    name = CATALOGUE.models[0].name
    async with PubSubAdmin("lanes", pubsub_endpoint) as admin, PubSubTransport("lanes", pubsub_endpoint) as broker:
        await provision(admin, CATALOGUE, inbox_pool=0, slots=1)
        async with (
            broker.subscribe(workers_subscription_id(name), max_messages=5) as interactive,
            broker.subscribe(batch_subscription_id(name), max_messages=5) as batch,
        ):
            for lane in ("batch", "", "batch", "interactive"):
                await broker.publish(jobs_topic_id(name), lane.encode() or b"none", {"lane": lane} if lane else {})
            got = [[(await anext(aiter(each))).data for _ in range(2)] for each in (interactive, batch)]
        assert got == [[b"none", b"interactive"], [b"batch", b"batch"]]


@pytest.mark.anyio
async def test_job_that_nobody_can_do_becomes_a_dead_letter(pubsub_endpoint: str) -> None:
    name = CATALOGUE.models[0].name
    async with PubSubAdmin("dead", pubsub_endpoint) as admin, PubSubTransport("dead", pubsub_endpoint) as broker:
        await provision(admin, CATALOGUE, inbox_pool=0, slots=1)
        await broker.publish(jobs_topic_id(name), b"poison", {"of": "course"})
        async with (
            broker.subscribe(workers_subscription_id(name), max_messages=1) as workers,
            broker.subscribe(dead_letter_subscription_id(name), max_messages=1) as dead,
        ):
            attempts = []
            for _ in range(5):
                message = await anext(aiter(workers))
                attempts.append(message.delivery_attempt)
                workers.nack(message)
            letter = await anext(aiter(dead))
        assert attempts == [1, 2, 3, 4, 5]
        assert (letter.data, letter.attributes["of"]) == (b"poison", "course")
