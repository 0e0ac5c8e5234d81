"""A finished batch is reported to a receiver in OpenAI's event format."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from shared.broker.transport import WEBHOOKS_TOPIC_ID
from shared.webhooks.event import BatchEvent, encode_batch_event, tenant_secrets
from shared.webhooks.publisher import WebhookPublisher
from tests.workers.functions.conftest import SECRETS
from tests.workers.functions.receiver import Receiver
from tests.workers.functions.world import World

pytestmark = pytest.mark.anyio


def ended(world: World, receiver: Receiver) -> BatchEvent:
    return BatchEvent(
        batch=f"batch_{world.request_id}",
        tenant="t",
        url=receiver.url,
        event="batch.completed",
        created_at_s=1_790_000_000.5,
    )


async def test_client_unwraps_what_comes(world: World, receiver: Receiver) -> None:
    event = ended(world, receiver)
    await WebhookPublisher(world.broker).publish_batch(event)
    (delivery,) = await receiver.wait(1)
    client = OpenAI(api_key="none", webhook_secret=tenant_secrets(SECRETS, "t")[0])
    found = client.webhooks.unwrap(delivery.body.decode(), dict(delivery.headers))
    assert found.type == "batch.completed"
    assert (found.data.id, found.created_at) == (event.batch, 1_790_000_000)
    assert found.id == delivery.id


async def test_repeated_announcement_has_the_same_id(world: World, receiver: Receiver) -> None:
    receiver.statuses = [503]
    for _ in range(2):
        await WebhookPublisher(world.broker).publish_batch(ended(world, receiver))
    deliveries = await receiver.wait(3)
    assert len({one.id for one in deliveries}) == 1
    assert len({json.loads(one.body)["id"] for one in deliveries}) == 1


async def test_message_that_is_no_end_is_given_up(world: World, receiver: Receiver) -> None:
    _, attributes = encode_batch_event(ended(world, receiver))
    await world.broker.publish(WEBHOOKS_TOPIC_ID, b"{}", attributes)
    await WebhookPublisher(world.broker).publish_batch(ended(world, receiver))
    assert len(await receiver.wait(1)) == 1
