"""A budget warning reaches a receiver, signed with the tenant's secret."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from shared.broker.transport import WEBHOOKS_TOPIC_ID
from shared.webhooks.event import BudgetEvent, encode_budget_event, tenant_secrets
from shared.webhooks.publisher import WebhookPublisher
from tests.workers.functions.conftest import SECRETS
from tests.workers.functions.receiver import Receiver
from tests.workers.functions.world import World

pytestmark = pytest.mark.anyio


def warning(world: World, receiver: Receiver) -> BudgetEvent:
    return BudgetEvent(
        tenant=f"t-{world.request_id}",
        key_id="",
        url=receiver.url,
        month="2026-11",
        share=0.8,
        budget_usd=100.0,
        spent_usd=80.5,
        created_at_s=1_790_000_000.5,
    )


async def test_warning_is_signed_and_says_what_is_spent(world: World, receiver: Receiver) -> None:
    event = warning(world, receiver)
    await WebhookPublisher(world.broker).publish_budget(event)
    (delivery,) = await receiver.wait(1)
    client = OpenAI(api_key="none", webhook_secret=tenant_secrets(SECRETS, event.tenant)[0])
    client.webhooks.verify_signature(delivery.body.decode(), dict(delivery.headers))
    body = json.loads(delivery.body)
    assert (body["type"], body["created_at"], body["id"]) == (
        "budget.warning",
        1_790_000_000,
        delivery.id,
    )
    assert body["data"] == {
        "tenant": event.tenant,
        "api_key_id": None,
        "month": "2026-11",
        "share": 0.8,
        "budget_usd": 100.0,
        "spent_usd": 80.5,
    }


async def test_repeated_warning_has_the_same_id(world: World, receiver: Receiver) -> None:
    receiver.statuses = [503]
    for _ in range(2):
        await WebhookPublisher(world.broker).publish_budget(warning(world, receiver))
    deliveries = await receiver.wait(3)
    assert len({one.id for one in deliveries}) == 1


async def test_message_that_is_no_warning_is_given_up(world: World, receiver: Receiver) -> None:
    _, attributes = encode_budget_event(warning(world, receiver))
    await world.broker.publish(WEBHOOKS_TOPIC_ID, b"{}", attributes)
    await WebhookPublisher(world.broker).publish_budget(warning(world, receiver))
    assert len(await receiver.wait(1)) == 1
