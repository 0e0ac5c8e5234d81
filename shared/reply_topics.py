"""Creates and deletes an inbox (its two topics), for a pool or a single instance."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from shared.topics import direct_id, inbox_topic_id, slot_filter, slot_subscription_id
from shared.transport import Admin, SubscriptionSettings


async def make_inbox(admin: Admin, inbox: str, slots: int, *, expires_after_s: int = 0) -> None:
    """Creates an inbox's topics with their subscriptions, unless they exist.

    These are one subscription per slot, and one without a filter for direct replies.

    Args:
        admin: creates them. It bounds the calls in flight.
        inbox: a number in the pool or the id of an instance.
        slots: how many. A single slot needs no filter.
        expires_after_s: the broker deletes subscriptions unused for this long. 0: never.

    Raises:
        PenstockError: as the admin's calls do.
    """
    topic_id, direct = inbox_topic_id(inbox), direct_id(inbox)
    await _all(admin.ensure_topic(topic) for topic in (topic_id, direct))
    subscriptions = {
        direct: SubscriptionSettings(direct, expires_after_s=expires_after_s, is_reply=True)
    } | {
        slot_subscription_id(inbox, slot): SubscriptionSettings(
            topic_id,
            slot_filter(slot, slots),
            expires_after_s=expires_after_s,
            is_reply=True,
        )
        for slot in range(slots)
    }
    await _all(
        admin.ensure_subscription(subscription_id, settings)
        for subscription_id, settings in subscriptions.items()
    )


async def remove_inbox(admin: Admin, inbox: str, slots: int) -> None:
    """Deletes an inbox. Topics and subscriptions that are gone already cause no error.

    Raises:
        PenstockError: as the admin's calls do.
    """
    topics = (inbox_topic_id(inbox), direct_id(inbox))
    await _all(admin.delete_topic(topic) for topic in topics)
    subscriptions = [direct_id(inbox), *(slot_subscription_id(inbox, n) for n in range(slots))]
    await _all(admin.delete_subscription(name) for name in subscriptions)


async def _all(calls: Iterable[Coroutine[Any, Any, bool]]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(call)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
