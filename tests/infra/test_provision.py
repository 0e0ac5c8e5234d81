"""The resources that the local stack creates on the broker: everything that the API and workers
use. Creating them again does no harm.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from infra.local.provision_servers import provision
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.pubsub.client import PubSubTransport
from shared.broker.transport import (
    WEBHOOKS_TOPIC_ID,
    batch_subscription_id,
    dead_letter_subscription_id,
    dead_letter_topic_id,
    direct_id,
    inbox_topic_id,
    jobs_topic_id,
    slot_subscription_id,
    workers_subscription_id,
)
from shared.models.catalog_file import read_catalog
from tests.limits import WAIT_LIMIT_S

CATALOG = read_catalog(Path("models.yaml"))


@pytest.mark.anyio
async def test_everything_in_use_is_created(pubsub_endpoint: str) -> None:
    async with PubSubAdmin("provisioned", pubsub_endpoint) as admin:
        for _ in range(2):
            await provision(admin, CATALOG, inbox_pool=2, slots=3)
        wanted = [slot_subscription_id(inbox, slot) for inbox in "01" for slot in range(3)]
        wanted += [direct_id(inbox) for inbox in "01"]
        for model in CATALOG.models:
            wanted += [workers_subscription_id(model.name), batch_subscription_id(model.name)]
            wanted += [dead_letter_subscription_id(model.name)]
        assert [await admin.subscription_exists(subscription_id) for subscription_id in wanted] == [
            True
        ] * len(wanted)
        assert not await admin.subscription_exists(slot_subscription_id("2", 0))


@pytest.mark.anyio
async def test_reply_reaches_its_slot_only(pubsub_endpoint: str) -> None:
    async with (
        PubSubAdmin("slots", pubsub_endpoint) as admin,
        PubSubTransport("slots", pubsub_endpoint) as broker,
    ):
        await provision(admin, CATALOG, inbox_pool=1, slots=2)
        async with (
            broker.subscribe(slot_subscription_id("0", 0), max_messages=5) as first,
            broker.subscribe(slot_subscription_id("0", 1), max_messages=5) as second,
        ):
            await broker.publish(inbox_topic_id("0"), b"for 1", {"slot": "1"})
            await broker.publish(inbox_topic_id("0"), b"for 0", {"slot": "0"})
            got = [(await anext(aiter(each))).data for each in (first, second)]
        assert got == [b"for 0", b"for 1"]


@pytest.mark.anyio
async def test_direct_reply_comes_once_whatever_its_slot(pubsub_endpoint: str) -> None:
    async with (
        PubSubAdmin("direct", pubsub_endpoint) as admin,
        PubSubTransport("direct", pubsub_endpoint) as broker,
    ):
        await provision(admin, CATALOG, inbox_pool=1, slots=2)
        async with (
            broker.subscribe(direct_id("0"), max_messages=5) as direct,
            broker.subscribe(slot_subscription_id("0", 0), max_messages=5) as slot,
        ):
            await broker.publish(direct_id("0"), b"direct", {})
            await broker.publish(direct_id("0"), b"of a slot", {"slot": "0"})
            await broker.publish(inbox_topic_id("0"), b"for the slot", {"slot": "0"})
            got = {(await anext(aiter(direct))).data for _ in range(2)}
            assert (await anext(aiter(slot))).data == b"for the slot"
        assert got == {b"direct", b"of a slot"}


@pytest.mark.anyio
async def test_job_has_one_priority(pubsub_endpoint: str) -> None:
    name = CATALOG.models[0].name
    async with (
        PubSubAdmin("priorities", pubsub_endpoint) as admin,
        PubSubTransport("priorities", pubsub_endpoint) as broker,
    ):
        await provision(admin, CATALOG, inbox_pool=0, slots=1)
        async with (
            broker.subscribe(workers_subscription_id(name), max_messages=5) as interactive,
            broker.subscribe(batch_subscription_id(name), max_messages=5) as batch,
        ):
            for priority in ("batch", "", "batch", "interactive"):
                await broker.publish(
                    jobs_topic_id(name),
                    priority.encode() or b"none",
                    {"lane": priority} if priority else {},
                )
            got = [
                [(await anext(aiter(each))).data for _ in range(2)] for each in (interactive, batch)
            ]
        assert got == [[b"none", b"interactive"], [b"batch", b"batch"]]


@pytest.mark.anyio
async def test_pushes_follow_the_functions(pubsub_endpoint: str) -> None:
    pushed: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    async def take(request: web.Request) -> web.Response:
        await pushed.put((request.path, await request.read()))
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/{function}", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    nowhere, here = "http://127.0.0.1:9", f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with (
        PubSubAdmin("pushes", pubsub_endpoint) as admin,
        PubSubTransport("pushes", pubsub_endpoint) as broker,
    ):
        for functions_url in (nowhere, here):
            await provision(admin, CATALOG, 0, 1, functions_url)
        await broker.publish(dead_letter_topic_id(CATALOG.models[0].name), b"", {"of": "course"})
        await broker.publish(WEBHOOKS_TOPIC_ID, b"", {"of": "course"})
        async with asyncio.timeout(WAIT_LIMIT_S):
            found = [await pushed.get() for _ in range(2)]
    await runner.cleanup()
    assert sorted(path for path, _ in found) == ["/dead_letter", "/webhook"]


@pytest.mark.anyio
async def test_job_that_nobody_can_do_becomes_a_dead_letter(pubsub_endpoint: str) -> None:
    name = CATALOG.models[0].name
    async with (
        PubSubAdmin("dead", pubsub_endpoint) as admin,
        PubSubTransport("dead", pubsub_endpoint) as broker,
    ):
        await provision(admin, CATALOG, inbox_pool=0, slots=1)
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
