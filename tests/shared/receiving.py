"""Helpers that receive messages, for broker tests."""

import asyncio

from shared.broker.transport import ReceivedMessage, Subscription
from tests.limits import WAIT_LIMIT_S


async def take(subscription: Subscription, count: int) -> list[ReceivedMessage]:
    messages = aiter(subscription)
    async with asyncio.timeout(WAIT_LIMIT_S):
        return [await anext(messages) for _ in range(count)]
