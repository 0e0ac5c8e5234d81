"""Creates on a local broker the topics and subscriptions that Terraform creates in the cloud."""

from __future__ import annotations

import asyncio

from shared.catalog import Catalog, Model
from shared.reply_topics import make_inbox
from shared.topics import (
    BATCH_FILTER,
    DEAD_LETTER_RETRY_S,
    INTERACTIVE_FILTER,
    WEBHOOK_RETRY_S,
    WEBHOOKS_SUBSCRIPTION_ID,
    WEBHOOKS_TOPIC_ID,
    batch_subscription_id,
    dead_letter_push_subscription_id,
    dead_letter_subscription_id,
    dead_letter_topic_id,
    jobs_topic_id,
    workers_subscription_id,
)
from shared.transport import Admin, SubscriptionSettings

JOB_RETENTION_S = 3600
"""Longer than any deadline, so no caller waits for an older message."""
DEAD_LETTER_RETENTION_S = 7 * 24 * 3600
RETRY_MIN_S, RETRY_MAX_S = 0.1, 10.0
"""Explicit, because with the service's default a job waits 10 s after a worker died."""
MAX_DELIVERY_ATTEMPTS = 5
PUSH_LIMIT_S = 60
"""How long a function may take for one message."""
EVENT_RETENTION_S = 24 * 3600


async def provision(
    admin: Admin, catalog: Catalog, inbox_pool: int, slots: int, functions_url: str = ""
) -> None:
    """Creates everything that is missing, and changes nothing that exists.

    Args:
        admin: an open connection with permission to create. It bounds the concurrent calls.
        catalog: its models get a jobs topic, a subscription of each lane for their workers, and a
            place for dead letters.
        inbox_pool: how many reply inboxes to make, numbered from 0.
        slots: filtered subscriptions of each inbox.
        functions_url: the URL of the functions, each at its own path. Empty: there are none.

    Raises:
        PenstockError: the broker refused or did not answer.
    """
    await admin.ensure_topic(WEBHOOKS_TOPIC_ID)
    await asyncio.gather(*(_provision_model(admin, model) for model in catalog.deployed))
    if functions_url:
        await _provision_pushes(admin, catalog, functions_url)
    for number in range(inbox_pool):
        await make_inbox(admin, str(number), slots)


async def _provision_model(admin: Admin, model: Model) -> None:
    jobs, dead = jobs_topic_id(model.name), dead_letter_topic_id(model.name)
    await asyncio.gather(admin.ensure_topic(jobs), admin.ensure_topic(dead))
    lanes = {
        workers_subscription_id(model.name): INTERACTIVE_FILTER,
        batch_subscription_id(model.name): BATCH_FILTER,
    }
    keep = SubscriptionSettings(dead, retention_s=DEAD_LETTER_RETENTION_S)
    await asyncio.gather(
        *(
            admin.ensure_subscription(lane, _for_workers(jobs, dead, which))
            for lane, which in lanes.items()
        ),
        admin.ensure_subscription(dead_letter_subscription_id(model.name), keep),
    )


async def _provision_pushes(admin: Admin, catalog: Catalog, functions_url: str) -> None:
    dead_letters = {
        dead_letter_push_subscription_id(model.name): SubscriptionSettings(
            dead_letter_topic_id(model.name),
            ack_deadline_s=PUSH_LIMIT_S,
            retention_s=DEAD_LETTER_RETENTION_S,
            retry_min_s=DEAD_LETTER_RETRY_S[0],
            retry_max_s=DEAD_LETTER_RETRY_S[1],
            push_endpoint=f"{functions_url}/dead_letter",
        )
        for model in catalog.deployed
    }
    webhooks = SubscriptionSettings(
        WEBHOOKS_TOPIC_ID,
        ack_deadline_s=PUSH_LIMIT_S,
        retention_s=EVENT_RETENTION_S,
        retry_min_s=WEBHOOK_RETRY_S[0],
        retry_max_s=WEBHOOK_RETRY_S[1],
        push_endpoint=f"{functions_url}/webhook",
    )
    pushed = dead_letters | {WEBHOOKS_SUBSCRIPTION_ID: webhooks}
    await asyncio.gather(
        *(admin.ensure_subscription(name, settings) for name, settings in pushed.items())
    )


def _for_workers(jobs: str, dead: str, which: str) -> SubscriptionSettings:
    """The settings of one lane's subscription, equal for both lanes."""
    return SubscriptionSettings(
        jobs,
        filter=which,
        retention_s=JOB_RETENTION_S,
        retry_min_s=RETRY_MIN_S,
        retry_max_s=RETRY_MAX_S,
        dead_letter_topic_id=dead,
        max_delivery_attempts=MAX_DELIVERY_ATTEMPTS,
    )
